"""Records that cross package borders, and the errors users see. Standard library only."""
