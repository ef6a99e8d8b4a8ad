"""The action service: planner, rails, ledger, backends and notifiers."""
