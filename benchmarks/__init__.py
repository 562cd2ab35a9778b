"""What is measured, and the test bed that measures it on several hosts."""
