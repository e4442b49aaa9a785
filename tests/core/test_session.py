"""What a process has one of: a new session has none of it, and leaves the old one as it was."""

import sys

from headrace.core.last_used import LastUsed
from headrace.core.process import SWITCH_SECONDS, take_command_began, tuned_interpreter
from headrace.core.session import new_session, session


def test_a_new_session_shares_nothing_and_the_old_one_comes_back() -> None:
    old = session()
    old.programs.put("a key", "a program")
    with new_session() as own:
        assert session() is own
        assert own.programs.get("a key") is None
        own.command_began = 1.0
        with old.devices.exclusive(), own.devices.transferring():  # nobody has these devices to himself
            assert take_command_began() == 1.0
    assert session() is old
    assert old.programs.get("a key") == "a program"


def test_the_interpreter_is_as_before_also_when_sessions_are_nested() -> None:
    before = sys.getswitchinterval()
    with tuned_interpreter(0.002), new_session():
        with tuned_interpreter():
            assert abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-5
        assert abs(sys.getswitchinterval() - 0.002) < 1e-5
    assert sys.getswitchinterval() == before


def test_the_things_taken_last_stay() -> None:
    things = LastUsed(2)
    for name in "ab":
        things.put(name, name.upper())
    assert things.take_or_make("a", lambda: "never made") == "A"
    assert things.take_or_make("c", lambda: "C") == "C"
    assert (things.get("a"), things.get("b"), things.get("c"), len(things)) == ("A", None, "C", 2)
    things.clear()
    assert things.get("a") is None
