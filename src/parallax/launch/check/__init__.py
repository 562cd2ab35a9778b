"""`parallax check`: whether hosts are ready to train together, and how fast their links are."""
