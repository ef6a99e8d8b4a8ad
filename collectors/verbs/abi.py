"""The part of libibverbs' interface that a ping needs. As in rdma-core 44.0; a test compares sizes, offsets and numbers with its header."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

QPT_UD = 4
WR_SEND = 2
SEND_SIGNALED = 2
ACCESS_LOCAL_WRITE = 1
PORT_ACTIVE = 4
LINK_LAYER_UNSPECIFIED, LINK_LAYER_INFINIBAND, LINK_LAYER_ETHERNET = 0, 1, 2
WC_SUCCESS, WC_RECV, WC_GRH = 0, 128, 1
QPS_INIT, QPS_RTR, QPS_RTS = 1, 2, 3
QP_STATE, QP_PKEY_INDEX, QP_PORT, QP_QKEY, QP_SQ_PSN = 1 << 0, 1 << 4, 1 << 5, 1 << 6, 1 << 16
GRH_BYTES = 40
"""In front of every datagram received, whether there was such a header or not."""
GID_BYTES = 16


class Gid(ctypes.Structure):
    """A union of 16 octets and two 64-bit words: it is aligned as the latter."""

    _fields_ = [("words", c_uint64 * 2)]


class Sge(ctypes.Structure):
    """A piece of memory."""

    _fields_ = [("addr", c_uint64), ("length", c_uint32), ("lkey", c_uint32)]


class RecvWr(ctypes.Structure):
    """A request to receive."""

    _fields_ = [("wr_id", c_uint64), ("next", c_void_p), ("sg_list", ctypes.POINTER(Sge)), ("num_sge", c_int)]


class Ud(ctypes.Structure):
    """The datagram's member of the union `wr`, filled up to the union's size."""

    _fields_ = [("ah", c_void_p), ("remote_qpn", c_uint32), ("remote_qkey", c_uint32), ("rest", c_uint64 * 2)]


class SendWr(ctypes.Structure):
    """A request to send."""

    _fields_ = [("wr_id", c_uint64), ("next", c_void_p), ("sg_list", ctypes.POINTER(Sge)), ("num_sge", c_int), ("opcode", c_uint),
                ("send_flags", c_uint), ("imm_data", c_uint32), ("ud", Ud), ("remote_srqn", c_uint32),
                ("rest", c_uint64 * 6)]  # fmt: skip


class Wc(ctypes.Structure):
    """A completion."""

    _fields_ = [("wr_id", c_uint64), ("status", c_uint), ("opcode", c_uint), ("vendor_err", c_uint32), ("byte_len", c_uint32),
                ("imm_data", c_uint32), ("qp_num", c_uint32), ("src_qp", c_uint32), ("wc_flags", c_uint), ("pkey_index", c_uint16),
                ("slid", c_uint16), ("sl", c_uint8), ("dlid_path_bits", c_uint8)]  # fmt: skip


class GlobalRoute(ctypes.Structure):
    """The global part of a way."""

    _fields_ = [("dgid", Gid), ("flow_label", c_uint32), ("sgid_index", c_uint8), ("hop_limit", c_uint8),
                ("traffic_class", c_uint8)]  # fmt: skip


class AhAttr(ctypes.Structure):
    """A way: what an address handle is made of."""

    _fields_ = [("grh", GlobalRoute), ("dlid", c_uint16), ("sl", c_uint8), ("src_path_bits", c_uint8), ("static_rate", c_uint8),
                ("is_global", c_uint8), ("port_num", c_uint8)]  # fmt: skip


class QpCap(ctypes.Structure):
    """Sizes of a queue pair."""

    _fields_ = [("max_send_wr", c_uint32), ("max_recv_wr", c_uint32), ("max_send_sge", c_uint32), ("max_recv_sge", c_uint32),
                ("max_inline_data", c_uint32)]  # fmt: skip


class QpInitAttr(ctypes.Structure):
    """What a queue pair is made of."""

    _fields_ = [("qp_context", c_void_p), ("send_cq", c_void_p), ("recv_cq", c_void_p), ("srq", c_void_p), ("cap", QpCap),
                ("qp_type", c_uint), ("sq_sig_all", c_int)]  # fmt: skip


class QpAttr(ctypes.Structure):
    """What a step of a queue pair sets."""

    _fields_ = [("qp_state", c_uint), ("cur_qp_state", c_uint), ("path_mtu", c_uint), ("path_mig_state", c_uint), ("qkey", c_uint32),
                ("rq_psn", c_uint32), ("sq_psn", c_uint32), ("dest_qp_num", c_uint32), ("qp_access_flags", c_uint), ("cap", QpCap),
                ("ah_attr", AhAttr), ("alt_ah_attr", AhAttr), ("pkey_index", c_uint16), ("alt_pkey_index", c_uint16),
                ("en_sqd_async_notify", c_uint8), ("sq_draining", c_uint8), ("max_rd_atomic", c_uint8),
                ("max_dest_rd_atomic", c_uint8), ("min_rnr_timer", c_uint8), ("port_num", c_uint8), ("timeout", c_uint8),
                ("retry_cnt", c_uint8), ("rnr_retry", c_uint8), ("alt_port_num", c_uint8), ("alt_timeout", c_uint8),
                ("rate_limit", c_uint32)]  # fmt: skip


class PortAttr(ctypes.Structure):
    """A port as it is now."""

    _fields_ = [("state", c_uint), ("max_mtu", c_uint), ("active_mtu", c_uint), ("gid_tbl_len", c_int), ("port_cap_flags", c_uint32),
                ("max_msg_sz", c_uint32), ("bad_pkey_cntr", c_uint32), ("qkey_viol_cntr", c_uint32), ("pkey_tbl_len", c_uint16),
                ("lid", c_uint16), ("sm_lid", c_uint16), ("lmc", c_uint8), ("max_vl_num", c_uint8), ("sm_sl", c_uint8),
                ("subnet_timeout", c_uint8), ("init_type_reply", c_uint8), ("active_width", c_uint8), ("active_speed", c_uint8),
                ("phys_state", c_uint8), ("link_layer", c_uint8), ("flags", c_uint8), ("port_cap_flags2", c_uint16)]  # fmt: skip


class PortAttrRoom(ctypes.Structure):
    """As much as a library of another version may write."""

    _fields_ = [("known", PortAttr), ("spare", c_uint8 * 64)]


class Mr(ctypes.Structure):
    """A registered memory region, up to the key that is needed."""

    _fields_ = [("context", c_void_p), ("pd", c_void_p), ("addr", c_void_p), ("length", c_size_t), ("handle", c_uint32),
                ("lkey", c_uint32)]  # fmt: skip


class Qp(ctypes.Structure):
    """A queue pair, up to its number."""

    _fields_ = [("context", c_void_p), ("qp_context", c_void_p), ("pd", c_void_p), ("send_cq", c_void_p), ("recv_cq", c_void_p),
                ("srq", c_void_p), ("handle", c_uint32), ("qp_num", c_uint32)]  # fmt: skip


class Channel(ctypes.Structure):
    """A channel of completion events, up to its descriptor."""

    _fields_ = [("context", c_void_p), ("fd", c_int)]


_OPS = (
    "query_device", "query_port", "alloc_pd", "dealloc_pd", "reg_mr", "rereg_mr", "dereg_mr", "alloc_mw", "bind_mw", "dealloc_mw",
    "create_cq", "poll_cq", "req_notify_cq", "cq_event", "resize_cq", "destroy_cq", "create_srq", "modify_srq", "query_srq",
    "destroy_srq", "post_srq_recv", "create_qp", "query_qp", "modify_qp", "destroy_qp", "post_send", "post_recv",
)  # fmt: skip


class ContextOps(ctypes.Structure):
    """What verbs.h calls inline, so that no symbol of the library stands for it: the driver's functions by their places."""

    _fields_ = [(name, c_void_p) for name in _OPS]


class Context(ctypes.Structure):
    """An open device, up to its functions."""

    _fields_ = [("device", c_void_p), ("ops", ContextOps)]


POLL_CQ = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, ctypes.POINTER(Wc))
REQ_NOTIFY_CQ = ctypes.CFUNCTYPE(c_int, c_void_p, c_int)
POST_SEND = ctypes.CFUNCTYPE(c_int, c_void_p, ctypes.POINTER(SendWr), ctypes.POINTER(c_void_p))
POST_RECV = ctypes.CFUNCTYPE(c_int, c_void_p, ctypes.POINTER(RecvWr), ctypes.POINTER(c_void_p))
_P = ctypes.POINTER
SYMBOLS: dict[str, tuple[object, tuple[object, ...]]] = {
    "ibv_get_device_list": (_P(c_void_p), (_P(c_int),)),
    "ibv_free_device_list": (None, (_P(c_void_p),)),
    "ibv_get_device_name": (ctypes.c_char_p, (c_void_p,)),
    "ibv_open_device": (_P(Context), (c_void_p,)),
    "ibv_close_device": (c_int, (_P(Context),)),
    "ibv_query_port": (c_int, (_P(Context), c_uint8, _P(PortAttrRoom))),
    "ibv_query_gid": (c_int, (_P(Context), c_uint8, c_int, _P(Gid))),
    "ibv_alloc_pd": (c_void_p, (_P(Context),)),
    "ibv_dealloc_pd": (c_int, (c_void_p,)),
    "ibv_reg_mr": (_P(Mr), (c_void_p, c_void_p, c_size_t, c_int)),
    "ibv_dereg_mr": (c_int, (_P(Mr),)),
    "ibv_create_comp_channel": (_P(Channel), (_P(Context),)),
    "ibv_destroy_comp_channel": (c_int, (_P(Channel),)),
    "ibv_create_cq": (c_void_p, (_P(Context), c_int, c_void_p, _P(Channel), c_int)),
    "ibv_destroy_cq": (c_int, (c_void_p,)),
    "ibv_get_cq_event": (c_int, (_P(Channel), _P(c_void_p), _P(c_void_p))),
    "ibv_ack_cq_events": (None, (c_void_p, c_uint)),
    "ibv_create_qp": (_P(Qp), (c_void_p, _P(QpInitAttr))),
    "ibv_destroy_qp": (c_int, (_P(Qp),)),
    "ibv_modify_qp": (c_int, (_P(Qp), _P(QpAttr), c_int)),
    "ibv_create_ah": (c_void_p, (c_void_p, _P(AhAttr))),
    "ibv_create_ah_from_wc": (c_void_p, (c_void_p, _P(Wc), c_void_p, c_uint8)),
    "ibv_destroy_ah": (c_int, (c_void_p,)),
}
"""Exported functions: result and arguments."""
