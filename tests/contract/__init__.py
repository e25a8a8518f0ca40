"""Rules about the contract: golden bytes, subjects, hostile messages."""
