"""Delivery to one receiver: send, judge, try again."""

from __future__ import annotations

import http.client
import logging
import random
import traceback
from collections.abc import Callable

from actions.notify.base import Judgement, Notifier, Reply
from actions.notify.guard import Refused
from actions.notify.outbox import Outbox, Waiting
from actions.notify.sender import Sender
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.errors import ConfigError
from trainwarden.records import Delivery
from trainwarden.selfmetrics import Metrics

LOG = logging.getLogger("trainwarden.actions.notify")

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
SHOWN_CHARACTERS = 200

Tell = Callable[[Delivery], None]


class Courier:
    """Delivers the notices of one receiver, one at a time.

    Parameters
    ----------
    tell
        Takes a `Delivery` per attempt, for the bus.
    """

    def __init__(self, notifier: Notifier, outbox: Outbox, sender: Sender, clock: Clock, metrics: Metrics, tell: Tell,
                 dice: random.Random | None = None) -> None:  # fmt: skip
        self.notifier = notifier
        self._outbox = outbox
        self._sender = sender
        self._clock = clock
        self._metrics = metrics
        self._tell = tell
        self._dice = dice or random.Random()

    def step(self) -> bool:
        """Attempt the next notice that is due; False when none is."""
        notice = self._outbox.next_due(self.notifier.receiver, self._clock.now_ns())
        if notice is None:
            return False
        if not notice.firing and not self._outbox.delivered_firing(notice):
            self._outbox.settle(notice, "dropped", "its firing was never delivered")
            self._report(notice, "dropped", "its firing was never delivered")
            return True
        self._conclude(notice, self._attempt(notice))
        return True

    def _attempt(self, notice: Waiting) -> Judgement:
        try:
            call = self.notifier.call(notice.notice_id, notice.body, self._clock.now_ns() // NS_PER_S)
            reply = self._sender.send(call, self.notifier.settings)
        except (Refused, ConfigError) as error:
            return Judgement(delivered=False, retry=not isinstance(error, Refused), reason=str(error))
        except (OSError, http.client.HTTPException) as error:
            # the text of some of these holds the url: the kind is enough
            return Judgement(delivered=False, retry=True, reason=f"{type(error).__name__}{_errno(error)}")
        except Exception as error:  # noqa: BLE001 - a notice that nobody can send is given up in its time, like any other
            return Judgement(delivered=False, retry=True, reason=f"{type(error).__name__} at {_place(error)}")
        judged = self.notifier.judge(reply)
        if judged.delivered or not reply.body:
            return judged
        return Judgement(False, judged.retry, f"{judged.reason}: {shown(reply)}", judged.after_s)

    def _conclude(self, notice: Waiting, judged: Judgement) -> None:
        now_ns = self._clock.now_ns()
        next_ns = now_ns + int(self._pause_s(notice.attempts + 1, judged.after_s) * NS_PER_S)
        late = next_ns > notice.created_ns + int(self.notifier.settings.give_up_s * NS_PER_S)
        if judged.delivered:
            self._outbox.settle(notice, "sent")
            self._report(notice, "sent", "")
        elif judged.retry and not late:
            self._outbox.postpone(notice, next_ns, judged.reason)
            self._report(notice, "retry", judged.reason)
        else:
            reason = (
                f"given up after {notice.attempts + 1} attempts: {judged.reason}" if judged.retry else judged.reason
            )
            self._outbox.settle(notice, "failed", reason)
            self._report(notice, "failed", reason)

    def _pause_s(self, attempts: int, after_s: float) -> float:
        """Full jitter over 1, 2, 4 ... 60 s, never before the receiver's own Retry-After."""
        ceiling_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(attempts - 1, 10))
        return max(self._dice.uniform(0.05 * ceiling_s, ceiling_s), after_s)

    def _report(self, notice: Waiting, status: str, reason: str) -> None:
        receiver, cause = notice.receiver, notice.cause.value
        level = logging.INFO if status == "sent" else logging.WARNING
        LOG.log(
            level,
            "incident %s revision %d to %s (%s): %s %s",
            notice.incident_id,
            notice.revision,
            receiver,
            cause,
            status,
            reason,
        )
        self._metrics.count("tw_deliveries_total", receiver=receiver, status=status)
        self._tell(Delivery(incident_id=notice.incident_id, revision=notice.revision, receiver=receiver, cause=cause,
                            attempt=notice.attempts + 1, status=status, reason=reason))  # fmt: skip


def shown(reply: Reply) -> str:
    """The start of a reply, printable, for a log; receivers echo what they were sent, so no more than that."""
    text = reply.body[: SHOWN_CHARACTERS * 4].decode(errors="replace")
    printable = "".join(character if character.isprintable() else " " for character in text)
    return printable[:SHOWN_CHARACTERS]


def _place(error: BaseException) -> str:
    """Where it happened; not what it says, which may hold the url."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


def _errno(error: BaseException) -> str:
    strerror = getattr(error, "strerror", None)
    return f": {strerror}" if isinstance(strerror, str) else ""
