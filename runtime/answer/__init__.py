"""From the tokens of an answer to reasoning, text and tool calls.

`format.py` says which format a model speaks; `inkling.py`, `glm.py` and `plain.py` parse one each,
token by token, so that what comes of an answer cannot depend on how its tokens were grouped;
`reader.py` drives one and watches for stop strings.
"""
