"""Data in and out: foreign files become rows (`importers`, `importing`), rows are proven sound
(`check`, `overlap`) and measured (`stats`)."""
