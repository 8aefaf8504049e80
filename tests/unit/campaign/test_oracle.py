"""The campaign's judge: a sound night passes, and each planted violation is caught."""

from dataclasses import replace

import pytest

from tests.campaign.history import Change
from tests.campaign.ledger import Intent, Promise
from tests.campaign.oracle import Evidence, judge
from tests.campaign.texts import Answer

ANSWER = Answer("rain on the roof", "eos", 9)


def life(*states: str, job_id: str = "a") -> list[Change]:
    """A job's changes: `queued`, `running`, ... each as a sound database writes it."""
    changes: list[Change] = []
    attempt = 0
    for n, state in enumerate(states):
        attempt += state == "running"
        final = state in ("succeeded", "failed", "cancelled")
        changes.append(
            Change(
                n=n,
                at=100.0 + n,
                op="U" if n else "I",
                id=job_id,
                state=state,
                attempt=attempt,
                worker="w" if state == "running" else None,
                stop_reason="eos" if state == "succeeded" else None,
                finished_at=100.0 + n if final else None,
                text=ANSWER.text if state == "succeeded" else None,
            )
        )
    return changes


def kinds(
    history: list[Change],
    *intents: Intent,
    promise: Promise | None = None,
    gone: bool = False,
    settled: bool = True,
) -> list[str]:
    """What the judge says about job `a`."""
    promise = promise or Promise("a", ANSWER)
    present = frozenset() if gone else frozenset(change.id for change in history if change.op != "D")
    evidence = Evidence({promise.job_id: promise}, intents, history, present, settled)
    return [violation.kind for violation in judge(evidence)]


def deleted(history: list[Change]) -> list[Change]:
    """The same, and then the row is gone."""
    return [*history, replace(history[-1], n=len(history), at=history[-1].at + 1, op="D")]


def test_a_night_with_a_rescue_a_retry_and_a_delete_is_sound() -> None:
    history = life("queued", "running", "queued", "running", "cancelled", "queued", "running", "succeeded")
    intents = (
        Intent("cancel", "a", 103.5, 104.0),
        Intent("retry", "a", 104.5, 105.0),
        Intent("delete", "a", 107.5, 109.0),
    )
    assert kinds(deleted(history), *intents, gone=True) == []


def test_a_job_that_was_acknowledged_and_never_stored_is_lost() -> None:
    assert kinds([]) == ["lost"]


def test_a_row_that_vanishes_is_lost() -> None:
    assert kinds(life("queued", "running", "succeeded"), gone=True) == ["lost"]


def test_a_job_that_does_not_end_is_caught_once_everything_had_the_time() -> None:
    assert kinds(life("queued", "running")) == ["unfinished"]
    assert kinds(life("queued", "running"), settled=False) == []


def test_a_job_that_ends_twice_is_caught() -> None:
    twice = life("queued", "running", "succeeded", "succeeded")
    assert kinds(twice) == ["final-changed"]
    assert kinds(life("queued", "running", "succeeded", "running", "succeeded")) == ["final-changed"]


@pytest.mark.parametrize("change", [{"text": "another"}, {"finished_at": 999.0}, {"attempt": 2}])
def test_a_final_row_that_changes_is_caught(change: dict[str, object]) -> None:
    history = life("queued", "running", "succeeded", "succeeded")
    history[-1] = replace(history[-1], **change)  # type: ignore[arg-type]
    assert "final-changed" in kinds(history)


@pytest.mark.parametrize("change", [{"text": "rain on the roo"}, {"stop_reason": "length"}, {"text": None}])
def test_a_wrong_text_is_caught(change: dict[str, object]) -> None:
    history = life("queued", "running", "succeeded")
    history[-1] = replace(history[-1], **change)  # type: ignore[arg-type]
    assert kinds(history) == ["wrong-text"]


def test_what_a_cancelled_job_keeps_must_begin_its_answer() -> None:
    history = life("queued", "running", "cancelled")
    asked = Intent("cancel", "a", 101.0)
    assert kinds([*history[:-1], replace(history[-1], text="rain on")], asked) == []
    assert kinds([*history[:-1], replace(history[-1], text="snow")], asked) == ["wrong-text"]


@pytest.mark.parametrize("attempts", [(1, 1), (1, 3)])
def test_an_attempt_that_does_not_grow_by_one_is_caught(attempts: tuple[int, int]) -> None:
    history = life("queued", "running", "queued", "running", "succeeded")
    for index, attempt in ((3, attempts[1]), (4, attempts[1])):
        history[index] = replace(history[index], attempt=attempt)
    assert kinds(history) == ["illegal"]


def test_a_change_of_hands_without_a_queue_between_is_caught() -> None:
    history = life("queued", "running", "running", "succeeded")
    history = [replace(change, attempt=min(change.attempt, 1)) for change in history]
    assert kinds(history) == []
    history[2] = replace(history[2], worker="another")
    assert kinds(history) == ["illegal"]


def test_an_innocent_that_fails_is_caught_and_a_guilty_one_is_not() -> None:
    history = life("queued", "running", "failed")
    assert kinds(history) == ["innocent-failed"]
    assert kinds(history, promise=Promise("a", guilty=True)) == []


def test_a_poison_that_succeeds_is_caught() -> None:
    assert kinds(life("queued", "running", "succeeded"), promise=Promise("a", guilty=True)) == [
        "guilty-succeeded"
    ]


def test_a_deadline_ends_jobs_and_never_early() -> None:
    history = [replace(change, deadline_at=102.0) for change in life("queued", "running", "failed")]
    history[-1] = replace(history[-1], stop_reason="deadline")
    assert kinds(history) == []
    assert kinds([replace(change, deadline_at=150.0) for change in history]) == ["deadline"]


def test_a_deadline_is_not_judged_by_a_clock_that_was_set_wrong() -> None:
    history = [replace(change, deadline_at=3600.0) for change in life("queued", "running", "failed")]
    history[-1] = replace(history[-1], stop_reason="deadline")

    def found(*wrong: tuple[float, float]) -> list[str]:
        evidence = Evidence({"a": Promise("a", ANSWER)}, [], history, frozenset("a"), wrong_clocks=wrong)
        return [violation.kind for violation in judge(evidence)]

    assert found() == ["deadline"]
    assert found((50.0, 60.0)) == ["deadline"]
    assert found((101.0, 103.0)) == []


def test_a_cancelled_job_that_nobody_cancelled_is_caught() -> None:
    assert kinds(life("queued", "cancelled")) == ["illegal"]
    assert kinds(life("queued", "running", "cancelled"), Intent("cancel", "another", 100.0)) == ["illegal"]


def test_who_has_left_explains_the_end_of_a_job_that_nobody_was_promised_alone() -> None:
    history, left = life("queued", "cancelled"), Intent("leave", "", 100.5, 101.0)
    assert kinds(history, left) == ["illegal"], "it was promised"
    assert kinds(history, left, promise=Promise("another", ANSWER)) == ["lost"], "the other one is"
    in_a_batch = [replace(change, batch="night") for change in history]
    assert kinds(in_a_batch, left, promise=Promise("another", ANSWER)) == ["lost", "illegal"]
    late = replace(left, began=110.0)
    assert kinds(history, late, promise=Promise("another", ANSWER)) == ["lost", "illegal"]


def test_a_retry_that_nobody_asked_for_is_caught() -> None:
    history = life("queued", "running", "failed", "queued", "running", "succeeded")
    assert kinds(history, promise=Promise("a", ANSWER, free=True)) == ["illegal"]


def test_a_row_may_be_deleted_only_by_a_delete_that_began_after_it_was_last_queued() -> None:
    history = life("queued", "running", "cancelled", "queued", "running", "succeeded")
    changed = (Intent("cancel", "a", 101.0), Intent("retry", "a", 102.0))
    assert kinds(deleted(history), *changed, gone=True) == ["deleted"]
    assert kinds(deleted(history), *changed, Intent("delete", "a", 101.0, 120.0), gone=True) == ["deleted"]
    assert kinds(deleted(history), *changed, Intent("delete", "a", 104.0, 120.0), gone=True) == []


def test_a_delete_that_waited_while_a_row_was_queued_again_is_sound_if_its_mark_came_later() -> None:
    history = life("queued", "running", "cancelled", "queued", "running", "succeeded")
    history = deleted([replace(change, batch="night") for change in history])
    calls = (
        Intent("cancel", "a", 101.0),
        Intent("retry", "a", 102.0),
        Intent("delete", "night", 102.0, 120.0),
    )
    for marked, found in ((100.0, ["deleted"]), (105.5, []), (107.0, ["deleted"])):
        evidence = Evidence(
            {"a": Promise("a", ANSWER)}, calls, history, frozenset(), deletions={"night": [marked]}
        )
        assert [violation.kind for violation in judge(evidence)] == found, marked


def test_a_row_that_was_only_tried_is_no_job_unless_it_was_acknowledged() -> None:
    history = deleted(life("cancelled"))
    assert kinds(history, promise=Promise("another", ANSWER), gone=True) == ["lost"]
    assert "deleted" in kinds(history, gone=True)


def test_prune_may_delete_only_what_ended_before_its_time() -> None:
    history = deleted(life("queued", "running", "succeeded"))
    assert kinds(history, Intent("prune", "101.0", 102.5, 110.0), gone=True) == ["deleted"]
    assert kinds(history, Intent("prune", "102.5", 102.5, 110.0), gone=True) == []


def test_an_unfinished_row_may_never_be_deleted() -> None:
    history = deleted(life("queued", "running"))
    assert kinds(history, Intent("delete", "a", 100.5, 110.0), gone=True) == ["deleted-unfinished"]


def test_a_final_row_has_an_end_and_a_running_one_a_worker() -> None:
    history = life("queued", "running", "succeeded")
    assert kinds([*history[:-1], replace(history[-1], finished_at=None)]) == ["illegal"]
    history[1] = replace(history[1], worker=None)
    assert kinds(history) == ["illegal"]


def chain(first: list[Change], second: list[Change]) -> list[Change]:
    """The changes of `p` and of `a`, which follows it, in the order of their times, as `at` has them."""
    named = [replace(change, id="p") for change in first] + [replace(change, prior="p") for change in second]
    ordered = sorted(named, key=lambda change: change.at)
    return [replace(change, n=n) for n, change in enumerate(ordered)]


def later(history: list[Change], seconds: float) -> list[Change]:
    return [
        replace(one, at=one.at + seconds, finished_at=one.finished_at and one.finished_at + seconds)
        for one in history
    ]


def test_a_row_that_follows_another_may_run_once_that_has_succeeded() -> None:
    first = life("queued", "running", "succeeded")
    assert kinds(chain(first, later(life("queued", "running", "succeeded"), 2.5))) == []
    assert kinds(chain(first, later(life("queued", "running", "succeeded"), 0.5))) == ["ran-early"]
    assert kinds(chain(deleted(first), later(life("queued", "running", "succeeded"), 9.0))) == [
        "deleted"  # of the first one, for which nobody asked
    ]


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_row_ends_unrun_only_with_the_one_that_it_follows(state: str) -> None:
    first = life("queued", "running", state)
    asked = Intent("cancel", "p", 100.0)
    assert kinds(chain(first, later(life("queued", state), 1.5)), asked) == []
    kept = chain(life("queued", "running", "succeeded"), later(life("queued", state), 2.5))
    assert sorted(kinds(kept)) == sorted(["illegal", *(["innocent-failed"] if state == "failed" else [])])


def test_a_retry_of_the_first_row_may_hold_those_behind_it_again() -> None:
    first = later(life("queued", "running", "cancelled", "queued", "running", "succeeded"), 0.0)
    second = later(life("queued", "cancelled", "queued", "running", "succeeded"), 1.5)
    second = [*second[:3], *later(second[3:], 1.0)]
    asked = (Intent("cancel", "p", 100.0), Intent("retry", "p", 102.5))
    assert kinds(chain(first, second), *asked) == []
    assert kinds(chain(first, second), asked[0]) == ["illegal", "illegal"]


def test_a_claim_of_a_worker_that_sleeps_and_one_that_it_keeps_are_caught() -> None:
    history = life("queued", "running", "succeeded")
    history[1] = replace(history[1], worker_state="ready")
    assert kinds(history) == []
    history[1] = replace(history[1], worker_state="sleeping")
    assert kinds(history) == ["claimed-asleep"]
    for held, found in ((0, []), (2, ["held-asleep"])):
        evidence = Evidence({}, (), [], frozenset(), sleepers=[("w", 100.0, 0), ("v", 101.0, held)])
        assert [violation.kind for violation in judge(evidence)] == found
