"""Where a node stands and what runs on it: facts of several origins, and the parsers of the formats that tell them."""
