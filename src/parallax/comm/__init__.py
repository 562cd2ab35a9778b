"""How rows and row gradients travel, and how a wait for other workers ends."""
