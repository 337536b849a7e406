"""The judge of speech: what a listener would understand, whose voice it is, and what is wrong with the sound.

It knows texts and sounds and nothing of what made them: `hocket.cli.eval` gives it a function that speaks.
docs/eval.md defines every figure.
"""
