"""The guest's clock, on whatever this host runs guests with."""

from __future__ import annotations

import time

from tests.box.fleet import Agent, Fleet

CLOCK_OPTIONS = {"kvm": {"clocksource=kvm-clock"}, "tcg": {"tsc=reliable"}}
CLOCK_SOURCE = {"kvm": "kvm-clock", "tcg": "tsc"}


async def test_the_kernel_is_told_its_clock_and_keeps_to_it(fleet: Fleet, box: str, agent: Agent) -> None:  # report 15
    accel = fleet.node.ask("GET", "/v1/node")["accel"]
    words = set((await agent.run(box, "cat /proc/cmdline")).split())
    assert words >= CLOCK_OPTIONS[accel]
    assert accel == "kvm" or any(word.startswith("tsc_early_khz=") for word in words)
    assert await agent.run(box, "cat /sys/devices/system/clocksource/clocksource0/current_clocksource") == CLOCK_SOURCE[accel]


async def test_nobody_waits_for_a_login_at_the_serial_port(box: str, agent: Agent) -> None:  # report 15
    assert await agent.run(box, "pgrep --list-full getty || true") == ""


# report 16: boxd steps the clock to the RTC every minute (tests/unit/boxd), so that is what must not drift over a standby
async def test_the_rtc_follows_the_host_over_a_freeze(fleet: Fleet, box: str, agent: Agent) -> None:
    fleet.change(box, "freeze")
    before = time.time()
    rtc = int(await agent.run(box, "cat /sys/class/rtc/rtc0/since_epoch"))
    assert before - 2 <= rtc <= time.time() + 1


async def test_the_first_command_after_a_start_has_the_right_time(fleet: Fleet, agent: Agent) -> None:  # report 14
    started = await agent.start("just started")
    try:
        before = time.time()
        clock = float(await agent.run(started, "date +%s.%N"))
        assert before - 2 <= clock <= time.time() + 2
    finally:
        fleet.destroy(started)
