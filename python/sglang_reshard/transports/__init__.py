"""How bytes move from trainer ranks into an engine rank's live parameters."""
