"""Pings over RDMA: libibverbs by ctypes, in a process of its own. No adapter was at hand: a stand-in library at the C interface is."""
