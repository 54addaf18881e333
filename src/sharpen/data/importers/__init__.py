"""Converters of foreign formats, one file per family; `sharpen.data.importing` runs them.

`chat` reads chat logs, `preferences` pairs and verdicts, `dialogs` recorded dialogs with a service,
`react` logs in text form, `tool_tasks` requests with gold calls, `question_tasks` questions with a
checkable answer. `common`, `tools` and `calls` hold what they share.
"""
