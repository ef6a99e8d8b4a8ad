"""One port of an adapter with one unreliable-datagram queue pair. All of it may hang in the kernel: one thread of the child owns it."""

from __future__ import annotations

import ctypes
import errno
import os
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from collectors.verbs import abi
from collectors.verbs.addresses import ETHERNET, INFINIBAND, Address, sender_of
from collectors.verbs.library import NoWayError, Verbs, failure

SLOTS = 64
SLOT_BYTES = 128
"""A received datagram with the 40 octets in front of it; nothing longer is taken."""
HANDLES_MAX = 1024
AT_ONCE = 16


@dataclass(frozen=True)
class Wanted:
    """A port to open. `qkey` has its top bit clear: with it set, the adapter would put in another one."""

    device: str
    number: int
    gid_index: int
    qkey: int
    service_level: int = 0
    traffic_class: int = 0
    pkey_index: int = 0

    @property
    def name(self) -> str:
        """As the source `rdma` names it."""
        return f"{self.device}/{self.number}"


@dataclass(frozen=True)
class Arrival:
    """A datagram that came, and how to answer it: `slot` holds the header of its way until the datagram is released."""

    payload: bytes
    sender: str
    slot: int
    completion: abi.Wc


class Port:
    """An open port.

    Raises
    ------
    OSError
        From the constructor and every method: what the driver says. A port that failed is closed and opened anew, but for
        `NoWayError` of `send` and `answer`.
    """

    def __init__(self, verbs: Verbs, wanted: Wanted) -> None:
        self.wanted = wanted
        self._verbs = verbs
        self._handles: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._free_slots = list(range(SLOTS))
        self._room = ctypes.create_string_buffer(2 * SLOTS * SLOT_BYTES)
        self._completions = (abi.Wc * AT_ONCE)()
        with ExitStack() as stack:
            self._open(stack)
            self.address = self.look()
            for slot in range(SLOTS):
                self._post(slot)
            self.listen()
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Undo everything, as far as the driver lets us."""
        for handle in self._handles.values():
            self._verbs.answer("ibv_destroy_ah", handle)
        self._handles.clear()
        self._stack.close()

    @property
    def fd(self) -> int:
        """Readable when something came."""
        return int(self._channel.contents.fd)

    def look(self) -> Address:
        """Where this port is reached now: the fabric may have given it another LID. Raises ENETDOWN when the link is not up."""
        attributes, gid = abi.PortAttrRoom(), abi.Gid()
        number = self.wanted.number
        self._verbs.done("ibv_query_port", self._context, number, ctypes.byref(attributes))
        if attributes.known.state != abi.PORT_ACTIVE:
            raise failure(f"port {self.wanted.name} is not active", errno.ENETDOWN)
        self._verbs.done("ibv_query_gid", self._context, number, self.wanted.gid_index, ctypes.byref(gid))
        layer = ETHERNET if attributes.known.link_layer == abi.LINK_LAYER_ETHERNET else INFINIBAND
        return Address(bytes(gid), int(attributes.known.lid), int(self._qp.contents.qp_num), self.wanted.qkey, layer)

    def listen(self) -> None:
        """Have the next arrival wake us, and take what woke us off the channel. What came before this call wakes nobody."""
        queue, context = ctypes.c_void_p(), ctypes.c_void_p()
        references = ctypes.byref(queue), ctypes.byref(context)
        events = 0
        while not self._verbs.answer("ibv_get_cq_event", self._channel, *references):
            events += 1
        if events:
            self._verbs.answer("ibv_ack_cq_events", self._receive_queue, events)
        if code := self._req_notify(self._receive_queue, 0):
            raise failure("ibv_req_notify_cq", code)

    def arrivals(self) -> list[Arrival]:
        """What came, `AT_ONCE` at most; each has to be released."""
        found = []
        for completion in self._finished(self._receive_queue):
            slot = int(completion.wr_id)
            if completion.status != abi.WC_SUCCESS:
                raise failure(f"receiving ended with status {completion.status}", errno.EIO)
            at = slot * SLOT_BYTES
            came = ctypes.string_at(ctypes.addressof(self._room) + at, min(int(completion.byte_len), SLOT_BYTES))
            header, payload = came[: abi.GRH_BYTES], came[abi.GRH_BYTES :]
            sender = sender_of(header, int(completion.slid), bool(completion.wc_flags & abi.WC_GRH))
            found.append(Arrival(payload, sender, slot, completion))
        return found

    def release(self, arrival: Arrival) -> None:
        """Make room for another one."""
        self._post(arrival.slot)

    def send(self, to: Address, payload: bytes) -> None:
        """Send a datagram."""
        self._send(self._handle_to(to), to.qpn, to.qkey, payload)

    def answer(self, arrival: Arrival, qkey: int, payload: bytes) -> None:
        """Send a datagram back the way that one came, with the key that its sender listens to."""
        key = ("back", arrival.sender, int(arrival.completion.slid), int(arrival.completion.sl))
        header = ctypes.byref(self._room, arrival.slot * SLOT_BYTES)
        handle = self._kept(key, "ibv_create_ah_from_wc", self._pd, ctypes.byref(arrival.completion), header,
                            self.wanted.number)  # fmt: skip
        self._send(handle, int(arrival.completion.src_qp), qkey, payload)

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _open(self, stack: ExitStack) -> None:
        verbs, wanted = self._verbs, self.wanted
        self._context = verbs.open(wanted.device)
        stack.callback(verbs.answer, "ibv_close_device", self._context)
        ops = self._context.contents.ops
        self._poll, self._req_notify = abi.POLL_CQ(ops.poll_cq), abi.REQ_NOTIFY_CQ(ops.req_notify_cq)
        self._post_send, self._post_recv = abi.POST_SEND(ops.post_send), abi.POST_RECV(ops.post_recv)
        self._pd = verbs.made("ibv_alloc_pd", self._context)
        stack.callback(verbs.answer, "ibv_dealloc_pd", self._pd)
        self._mr = verbs.made("ibv_reg_mr", self._pd, self._room, len(self._room), abi.ACCESS_LOCAL_WRITE)
        stack.callback(verbs.answer, "ibv_dereg_mr", self._mr)
        self._channel = verbs.made("ibv_create_comp_channel", self._context)
        stack.callback(verbs.answer, "ibv_destroy_comp_channel", self._channel)
        os.set_blocking(self._channel.contents.fd, False)
        self._receive_queue = self._queue(stack, self._channel)
        self._send_queue = self._queue(
            stack, None
        )  # of its own, without a channel: nobody wakes because something has left
        self._qp = self._pair(stack)

    def _queue(self, stack: ExitStack, channel: Any) -> Any:
        queue = self._verbs.made("ibv_create_cq", self._context, SLOTS, None, channel, 0)
        stack.callback(self._verbs.answer, "ibv_destroy_cq", queue)
        return queue

    def _pair(self, stack: ExitStack) -> Any:
        cap = abi.QpCap(max_send_wr=SLOTS, max_recv_wr=SLOTS, max_send_sge=1, max_recv_sge=1)
        init = abi.QpInitAttr(send_cq=self._send_queue, recv_cq=self._receive_queue, cap=cap, qp_type=abi.QPT_UD)
        pair = self._verbs.made("ibv_create_qp", self._pd, ctypes.byref(init))
        stack.callback(self._verbs.answer, "ibv_destroy_qp", pair)
        first = {"qp_state": abi.QPS_INIT, "pkey_index": self.wanted.pkey_index, "port_num": self.wanted.number,
                 "qkey": self.wanted.qkey}  # fmt: skip
        self._step(pair, abi.QP_STATE | abi.QP_PKEY_INDEX | abi.QP_PORT | abi.QP_QKEY, **first)
        self._step(pair, abi.QP_STATE, qp_state=abi.QPS_RTR)
        self._step(pair, abi.QP_STATE | abi.QP_SQ_PSN, qp_state=abi.QPS_RTS)
        return pair

    def _step(self, pair: Any, mask: int, **fields: int) -> None:
        self._verbs.done("ibv_modify_qp", pair, ctypes.byref(abi.QpAttr(**fields)), mask)

    def _post(self, slot: int) -> None:
        entry = self._entry(slot, SLOT_BYTES)
        request, bad = abi.RecvWr(wr_id=slot, sg_list=ctypes.pointer(entry), num_sge=1), ctypes.c_void_p()
        if code := self._post_recv(self._qp, ctypes.byref(request), ctypes.byref(bad)):
            raise failure("ibv_post_recv", abs(code))

    def _entry(self, slot: int, length: int) -> abi.Sge:
        address = ctypes.addressof(self._room) + slot * SLOT_BYTES
        return abi.Sge(addr=address, length=length, lkey=self._mr.contents.lkey)

    def _finished(self, queue: Any) -> list[abi.Wc]:
        count = self._poll(queue, AT_ONCE, self._completions)
        if count < 0:
            raise failure("ibv_poll_cq", errno.EIO)
        return [abi.Wc.from_buffer_copy(self._completions[index]) for index in range(count)]

    def _collect_sent(self) -> None:
        while finished := self._finished(self._send_queue):
            for completion in finished:
                self._free_slots.append(int(completion.wr_id))
                if completion.status != abi.WC_SUCCESS:
                    raise failure(f"sending ended with status {completion.status}", errno.EIO)

    def _send(self, handle: Any, qpn: int, qkey: int, payload: bytes) -> None:
        self._collect_sent()
        if not self._free_slots:
            raise failure("nothing that was sent has left", errno.ENOBUFS)
        slot = self._free_slots.pop()
        entry = self._entry(SLOTS + slot, len(payload))
        ctypes.memmove(entry.addr, payload, len(payload))
        request = abi.SendWr(wr_id=slot, sg_list=ctypes.pointer(entry), num_sge=1, opcode=abi.WR_SEND, send_flags=abi.SEND_SIGNALED,
                             ud=abi.Ud(ah=handle, remote_qpn=qpn, remote_qkey=qkey))  # fmt: skip
        bad = ctypes.c_void_p()
        if code := self._post_send(self._qp, ctypes.byref(request), ctypes.byref(bad)):
            self._free_slots.append(slot)
            raise failure("ibv_post_send", abs(code))

    def _handle_to(self, to: Address) -> Any:
        wanted = self.wanted
        route = abi.GlobalRoute(dgid=abi.Gid.from_buffer_copy(to.gid), sgid_index=wanted.gid_index, hop_limit=64,
                                traffic_class=wanted.traffic_class)  # fmt: skip
        routed = to.layer == ETHERNET or not to.lid or to.gid[:8] != self.address.gid[:8]
        attributes = abi.AhAttr(
            grh=route, dlid=to.lid, sl=wanted.service_level, is_global=routed, port_num=wanted.number
        )
        return self._kept(("to", to.gid, to.lid), "ibv_create_ah", self._pd, ctypes.byref(attributes))

    def _kept(self, key: tuple[Any, ...], name: str, *arguments: Any) -> Any:
        """The address handle of a peer: the kernel is asked for it once."""
        handle = self._handles.get(key)
        if handle is None:
            try:
                handle = self._verbs.made(name, *arguments)
            except OSError as error:
                raise NoWayError(error.errno, error.strerror) from None
            if len(self._handles) >= HANDLES_MAX:
                self._verbs.answer("ibv_destroy_ah", self._handles.popitem(last=False)[1])
            self._handles[key] = handle
        return handle
