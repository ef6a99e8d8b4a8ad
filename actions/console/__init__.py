"""What people read: the status in a terminal and on one page. Read only; when store, broker or service are away it says so."""
