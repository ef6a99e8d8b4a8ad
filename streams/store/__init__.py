"""The analysts' store: ClickHouse, or chDB embedded, behind one client."""
