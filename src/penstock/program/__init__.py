"""Program: what every rank executes, message by message; made by `lower`, rewritten by passes."""
