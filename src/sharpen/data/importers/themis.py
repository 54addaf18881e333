"""Themis (TARA) pairs: a better and a worse answer, each with the tool trace that tells them
apart."""

from __future__ import annotations

from sharpen.data.importers import Importer, Rows, has
from sharpen.types import Json, Message, Preference


def convert(row: Json, where: str, side: None) -> Rows:
    good, bad = row["pos_answer"], row["neg_answer"]
    yield Preference(
        (Message("user", row["question"]),),
        (Message("assistant", good["answer"]),),
        (Message("assistant", bad["answer"]),),
        id=row["id"],
        chosen_score=float(good["score"]),
        rejected_score=float(bad["score"]),
        metadata={
            f"{side_name}_{key}": answer.get(key)
            for side_name, answer in (("chosen", good), ("rejected", bad))
            for key in ("actions", "score_agent")
        },
    )


IMPORTERS = (Importer("themis", has("pos_answer", "neg_answer"), convert),)
