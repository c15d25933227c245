"""Sentences that a tokenizer is made from, and prompts."""

CORPUS = (
    "A shard of a weight travels straight to the rank that needs it, and to no other.",
    "The trainer keeps its own layout; the engine keeps its own; the plan is made between them once.",
    "Nothing is gathered, so nothing has to be large enough to hold everything.",
    "Each box is cast and written in place, and the addresses never change.",
    "Four ranks hold the model in quarters, and sixteen ranks hold it in sixteenths.",
    "An update that did not reach every rank is not an update.",
    "When the last byte has landed, the engine answers with the new weights.",
    "The same tokens from both sides, greedy and exact: that is the proof.",
)

PROMPTS = (
    "A shard of a weight",
    "Nothing is gathered",
    "The engine answers with",
    "Four ranks hold",
)
NEW_TOKENS = 12
