"""Trainer ranks send exactly the elements that engine ranks lack, in messages of bounded size."""
