"""Pure decisions: what is stored where, and which rank writes it."""
