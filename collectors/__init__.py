"""Node agents: sources that read one node, and the agent that ships what they read."""
