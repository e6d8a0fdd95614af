"""Tests `vmferry run --api` with qemu.qmp and qmp-shell, as operators' tools use it.

    clients.py VMFERRY KIND...

Ends with status 0 if all tests pass, and prints the tests on standard output.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time

from qemu.qmp import EventListener, ExecuteError, QMPClient

# Longer than any step of a test takes on a busy host.
PATIENCE = 180
WORKLOAD = "uniform,ws=16M,data=48M,rate=20k,fill=random"
MEMORY = 96 << 20
PAGE = 4096


# Members that QMP's reference does not call optional. Clients that are generated from its schema
# refuse an answer that lacks one.
MEMBERS = {
    "query-status": {"running": bool, "status": str},
    "query-kvm": {"enabled": bool, "present": bool},
    "query-cpus-fast": {"cpu-index": int, "qom-path": str, "thread-id": int, "target": str},
    "query-dirty-rate": {
        "status": str,
        "start-time": int,
        "calc-time": int,
        "calc-time-unit": str,
        "sample-pages": int,
        "mode": str,
    },
    "ram": {
        **dict.fromkeys(["transferred", "remaining", "total", "duplicate", "normal", "normal-bytes"], int),
        **dict.fromkeys(["dirty-pages-rate", "dirty-sync-count", "postcopy-requests", "page-size"], int),
        **dict.fromkeys(["multifd-bytes", "pages-per-second", "precopy-bytes", "downtime-bytes"], int),
        **dict.fromkeys(["postcopy-bytes", "dirty-sync-missed-zero-copy"], int),
        "mbps": float,
    },
}


def whole(kind, answer):
    """Checks that the answer has all members, and returns the answer."""
    for name, its_type in MEMBERS[kind].items():
        assert type(answer.get(name)) is its_type, f"{name} of {kind}: {answer}"
    return answer


class Guest:
    """A `vmferry run`, which is ended and waited for."""

    def __init__(self, vmferry, folder, name, kind, *more):
        self.api = os.path.join(folder, name)
        args = [vmferry, "run", "--guest", kind, "--memory", "96M", "--api", self.api, *more]
        self.log = open(self.api + ".log", "wb")
        self.process = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    async def connect(self, name="test"):
        until = time.monotonic() + PATIENCE
        while True:
            client = QMPClient(name)
            try:
                await client.connect(self.api)
                return client
            except Exception as error:  # The library wraps errors in various types.
                if time.monotonic() > until or self.process.poll() is not None:
                    raise AssertionError(f"{self.api}: {error}; {self.said()}") from error
                await asyncio.sleep(0.05)

    def said(self):
        with open(self.log.name, encoding="utf-8", errors="replace") as log:
            return log.read()

    async def ended(self):
        until = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < until, f"{self.api} did not end"
            await asyncio.sleep(0.02)
        return self.process.returncode

    async def close(self):
        """Ends the process without blocking the event loop: a process with a VM can take seconds to end."""
        if self.process.poll() is None:
            self.process.kill()
        await asyncio.to_thread(self.process.wait)
        self.log.close()


class Watcher:
    """Records all events that a client gets."""

    def __init__(self, client, names=None):
        self.client = client
        self.listener = EventListener(names)
        client.register_listener(self.listener)
        self.seen = []

    async def wait(self, name, **data):
        """Waits for an event and returns it; earlier events are kept in `seen`."""

        def fits(event):
            return event["event"] == name and all(event.get("data", {}).get(k) == v for k, v in data.items())

        async def look():
            while True:
                event = await self.listener.get()
                self.seen.append(event)
                if fits(event):
                    return event
                # After the end of a migration, no event follows.
                if event["event"] == "MIGRATION" and event["data"]["status"] == "failed":
                    info = await self.client.execute("query-migrate")
                    raise AssertionError(f"{name} {data} is awaited, and the migration failed: {info}")

        for event in self.seen:
            if fits(event):
                return event
        try:
            return await asyncio.wait_for(look(), PATIENCE)
        except asyncio.TimeoutError as error:
            raise AssertionError(f"no {name} {data} among {self.seen}") from error

    def statuses(self):
        return [event["data"]["status"] for event in self.seen if event["event"] == "MIGRATION"]


async def until(what, look, within=PATIENCE):
    """Waits until `look` returns a value."""
    end = time.monotonic() + within
    while True:
        found = await look()
        if found:
            return found
        assert time.monotonic() < end, f"waited in vain for {what}"
        await asyncio.sleep(0.02)


async def refused(client, command, words, arguments=None, error_class="GenericError"):
    """Checks that the command fails with this class and these words."""
    try:
        answer = await client.execute(command, arguments)
    except ExecuteError as error:
        assert error.error_class == error_class, f"{command}: {error.error_class}: {error}"
        assert words in str(error), f"{command}: {error}"
    else:
        raise AssertionError(f"{command} {arguments} was not refused: {answer}")


async def leave(client):
    """Disconnects, whether or not the server still runs."""
    with contextlib.suppress(Exception):
        await client.disconnect()


async def source_of(vmferry, folder, kind, stack, *more):
    guest = Guest(vmferry, folder, "source", kind, "--workload", WORKLOAD, *more)
    stack.push_async_callback(guest.close)
    client = await guest.connect("source")
    stack.push_async_callback(leave, client)

    async def runs():
        guest_state = (await client.execute("x-vmferry-status"))["vm"]["guest"]
        return (guest_state.get("writes") or 0) > 100

    await until("the guest running", runs)
    return guest, client


async def target_of(vmferry, folder, name, kind, stack, *more):
    guest = Guest(vmferry, folder, name, kind, "--incoming", "defer", "--peer-timeout", "120s", *more)
    stack.push_async_callback(guest.close)
    client = await guest.connect(name)
    stack.push_async_callback(leave, client)
    assert (await client.execute("query-status")) == {"running": False, "status": "inmigrate"}
    assert (await client.execute("query-migrate")) == {}
    await client.execute("migrate-incoming", {"uri": "tcp:127.0.0.1:0"})

    async def listens():
        info = await client.execute("query-migrate")
        return info.get("socket-address")

    [address] = await until("the target listening", listens)
    assert address["type"] == "inet", address
    await refused(client, "migrate-incoming", "already", {"uri": "tcp:127.0.0.1:0"})
    return guest, client, f"tcp:{address['host']}:{address['port']}"


async def set_capabilities(client, **states):
    wanted = [{"capability": name.replace("_", "-"), "state": state} for name, state in states.items()]
    await client.execute("migrate-set-capabilities", {"capabilities": wanted})


async def queries(client, kind):
    """Tests queries about a running guest."""
    version = await client.execute("query-version")
    assert version["package"].startswith("vmferry-") and set(version["qemu"]) == {"major", "minor", "micro"}
    names = {command["name"] for command in await client.execute("query-commands")}
    for name in ["migrate", "query-migrate", "stop", "cont", "quit", "x-vmferry-status", "qmp_capabilities"]:
        assert name in names, f"{name} of {sorted(names)}"
    await refused(client, "device_add", "has not been found", {"driver": "e1000"}, "CommandNotFound")
    await refused(client, "query-status", "unexpected", {"x": 1})
    await refused(client, "migrate", "'uri' or 'channels'")
    await refused(client, "migrate", "uri", {"uri": 7})
    await refused(client, "migrate", "scheme", {"uri": "http://x"})
    await refused(client, "migrate", "Parameter 'colour' is unexpected", {"uri": "x", "colour": 1})
    address = {"transport": "socket", "type": "inet", "host": "127.0.0.1", "port": "1", "keep-alive": True}
    await refused(client, "migrate", "keep-alive", {"channels": [{"channel-type": "main", "addr": address}]})
    await refused(client, "x-vmferry-pause", "'force' is unexpected", {"force": True})
    await refused(client, "balloon", "Parameter 'value' is missing")
    await refused(client, "system_powerdown", "power button")
    assert await client.execute("query-status") == {"running": True, "status": "running"}
    whole("query-kvm", await client.execute("query-kvm"))
    assert await client.execute("query-kvm") == {"enabled": kind == "kvm", "present": os.path.exists("/dev/kvm")}
    assert await client.execute("query-name") == {}
    assert await client.execute("query-uuid") == {"UUID": "00000000-0000-0000-0000-000000000000"}
    [cpu] = await client.execute("query-cpus-fast")
    assert whole("query-cpus-fast", cpu)["cpu-index"] == 0 and cpu["target"] == "x86_64", cpu
    assert os.path.exists(f"/proc/{cpu['thread-id']}"), cpu
    assert await client.execute("query-migrate") == {}
    await refused(client, "migrate-start-postcopy", "postcopy-ram")
    await refused(client, "migrate-pause", "postcopy")
    await refused(client, "migrate-recover", "paused", {"uri": "tcp:127.0.0.1:1"})
    await refused(client, "migrate", "no paused migration", {"uri": "tcp:127.0.0.1:1", "resume": True})
    await refused(client, "migrate-incoming", "--incoming defer", {"uri": "tcp:127.0.0.1:0"})
    assert await client.execute("migrate_cancel") == {}


async def settings(client):
    """Tests capabilities and parameters."""
    before = {c["capability"]: c["state"] for c in await client.execute("query-migrate-capabilities")}
    assert before["multifd"] is False and before["return-path"] is True, before
    await set_capabilities(client, multifd=True)
    after = {c["capability"]: c["state"] for c in await client.execute("query-migrate-capabilities")}
    assert after == {**before, "multifd": True}
    try:
        await set_capabilities(client, events=True, rdma_pin_all=True)
    except ExecuteError as error:
        assert "rdma-pin-all" in str(error), error
    else:
        raise AssertionError("rdma-pin-all was not refused")
    assert {c["capability"]: c["state"] for c in await client.execute("query-migrate-capabilities")} == after
    await client.execute("migrate-set-parameters", {"multifd-channels": 4, "downtime-limit": 500})
    parameters = await client.execute("query-migrate-parameters")
    assert (parameters["multifd-channels"], parameters["downtime-limit"]) == (4, 500), parameters
    await refused(client, "migrate-set-parameters", "between 1 and 64", {"multifd-channels": 65})
    await client.execute("migrate-set-parameters", {"multifd-compression": "zstd", "multifd-zstd-level": 2})
    parameters = await client.execute("query-migrate-parameters")
    assert (parameters["multifd-compression"], parameters["multifd-zstd-level"]) == ("zstd", 2), parameters
    assert type(parameters["xbzrle-cache-size"]) is int, parameters
    await client.execute("migrate-set-parameters", {"multifd-compression": "none"})
    await refused(client, "migrate-set-parameters", "none and zstd", {"multifd-compression": "zlib"})
    await refused(client, "migrate-set-parameters", "'cpu-throttle-initial'", {"cpu-throttle-initial": 5})


async def stop_and_cont(client):
    """Tests that each client gets each event once."""
    other = Watcher(client, ["STOP", "RESUME"])
    await client.execute("stop")
    event = await other.wait("STOP")
    assert abs(event["timestamp"]["seconds"] - time.time()) < PATIENCE, event
    assert 0 <= event["timestamp"]["microseconds"] < 1_000_000, event
    assert await client.execute("query-status") == {"running": False, "status": "paused"}
    await client.execute("stop")
    await refused(client, "calc-dirty-rate", "does not run", {"calc-time": 1})
    await client.execute("cont")
    await client.execute("cont")
    await other.wait("RESUME")
    assert [event["event"] for event in other.seen] == ["STOP", "RESUME"], other.seen
    client.remove_listener(other.listener)


async def dirty_rate(client):
    assert (await client.execute("query-dirty-rate"))["status"] == "unstarted"
    await refused(client, "calc-dirty-rate", "calc-time", {"calc-time": 3600})
    await client.execute("calc-dirty-rate", {"calc-time": 4000, "calc-time-unit": "millisecond"})
    await refused(client, "calc-dirty-rate", "still measuring", {"calc-time": 1})

    async def measured():
        info = await client.execute("query-dirty-rate", {"calc-time-unit": "millisecond"})
        return info if info["status"] == "measured" else None

    info = await until("the dirty rate", measured)
    whole("query-dirty-rate", info)
    # 20,000 writes per second into 16 MiB dirty 29 MiB per second; a busy host slows the guest.
    assert 1 <= info["dirty-rate"] <= 100 and info["calc-time"] == 4000 and info["mode"] == "dirty-bitmap", info


async def balloon(client, kind):
    stats = {"path": "/machine/peripheral/balloon0", "property": "guest-stats"}
    interval = {**stats, "property": "guest-stats-polling-interval"}
    if kind == "process":
        await refused(client, "query-balloon", "No balloon", None, "DeviceNotActive")
        await refused(client, "balloon", "No balloon", {"value": 64 << 20}, "DeviceNotActive")
        await refused(client, "qom-get", "not found", stats, "DeviceNotFound")
        return
    watcher = Watcher(client, ["BALLOON_CHANGE"])
    assert await client.execute("query-balloon") == {"actual": MEMORY}
    await refused(client, "balloon", "the guest can have", {"value": 1})
    await client.execute("balloon", {"value": 80 << 20})
    answer = await client.execute("qom-get", stats)
    assert len(answer["stats"]) == 16 and isinstance(answer["last-update"], int), answer
    assert await client.execute("qom-get", interval) == 1
    await client.execute("qom-set", {**interval, "value": 5})
    assert await client.execute("qom-get", interval) == 5
    await refused(client, "qom-set", "seconds", {**interval, "value": -1})
    reporting = {**stats, "property": "free-page-reporting"}
    assert await client.execute("qom-get", reporting) is True
    await client.execute("qom-set", {**reporting, "value": False})
    assert await client.execute("qom-get", reporting) is False
    assert (await client.execute("x-vmferry-balloon"))["reporting"] is False
    await refused(client, "qom-set", "true or false", {**reporting, "value": "on"})
    await client.execute("qom-set", {**reporting, "value": True})
    await refused(client, "qom-get", "not found", {**stats, "property": "colour"})
    await refused(client, "qom-get", "not found", {**stats, "path": "/machine/nothing"}, "DeviceNotFound")
    # The measuring guest has a balloon driver only with some workloads. With a driver, all clients
    # get the event.
    if (await client.execute("x-vmferry-status"))["vm"]["balloon"]["driver"]:
        await watcher.wait("BALLOON_CHANGE")
    client.remove_listener(watcher.listener)


async def a_migration(vmferry, folder, kind):
    """Tests the setup, the events and the reports of a migration at source and target."""
    async with contextlib.AsyncExitStack() as stack:
        source, client = await source_of(vmferry, folder, kind, stack)
        await queries(client, kind)
        await settings(client)
        await stop_and_cont(client)
        await dirty_rate(client)
        await balloon(client, kind)
        target, there, uri = await target_of(vmferry, folder, "target", kind, stack)
        second = await source.connect("second")
        stack.push_async_callback(leave, second)
        watchers = [Watcher(client), Watcher(second)]
        arriving = Watcher(there)
        for each in (client, there):
            await set_capabilities(each, events=True)
        # The migration takes at least six seconds, and then the 16 MB that the guest writes fit the
        # limit.
        slow = {"max-bandwidth": 8_000_000, "downtime-limit": 4000}
        await client.execute("migrate-set-parameters", slow)
        await client.execute("migrate", {"uri": uri})

        async def under_way():
            info = await client.execute("query-migrate")
            return info if info["status"] == "active" and info["ram"]["transferred"] > 0 else None

        info = await until("the migration under way", under_way)
        ram = whole("ram", info["ram"])
        assert ram["total"] == MEMORY and ram["page-size"] == PAGE, info
        assert ram["precopy-bytes"] == ram["transferred"] == ram["multifd-bytes"] > 0, info
        assert info["ram"]["remaining"] <= MEMORY and "total-time" in info, info
        assert await client.execute("query-status") == {"running": True, "status": "running"}
        await refused(second, "stop", "being migrated")
        await refused(second, "migrate", "being migrated", {"uri": uri})
        await refused(second, "migrate-set-parameters", "in progress", {"downtime-limit": 1})
        for watcher in watchers:
            await watcher.wait("MIGRATION", status="completed")
            assert watcher.statuses() == ["setup", "active", "device", "completed"], watcher.seen
            names = [event["event"] for event in watcher.seen]
            assert names.index("STOP") < len(names) - 1 and "RESUME" not in names, names
            passes = [event["data"]["pass"] for event in watcher.seen if event["event"] == "MIGRATION_PASS"]
            assert passes and passes == list(range(1, len(passes) + 1)), passes
        await arriving.wait("MIGRATION", status="completed")
        await arriving.wait("RESUME")
        info = await client.execute("query-migrate")
        assert info["status"] == "completed" and info["downtime"] >= 0, info
        ram = whole("ram", info["ram"])
        parts = [ram["precopy-bytes"], ram["downtime-bytes"]]
        assert all(parts) and sum(parts) == ram["transferred"] and ram["postcopy-bytes"] == 0, info
        assert info["ram"]["transferred"] > 48 << 20 and info["ram"]["total"] == MEMORY, info
        assert await client.execute("query-status") == {"running": False, "status": "postmigrate"}
        assert (await there.execute("query-migrate"))["status"] == "completed"
        assert await there.execute("query-status") == {"running": True, "status": "running"}
        await refused(client, "cont", "moved to its target")
        # The source stays until `quit`, because a QMP client started the migration. Otherwise it
        # would end after a second. On a busy host this check may miss a defect.
        await asyncio.sleep(1.5)
        goodbye = Watcher(second, ["SHUTDOWN"])
        await client.execute("quit")
        event = await goodbye.wait("SHUTDOWN")
        assert event["data"] == {"guest": False, "reason": "host-qmp-quit"}, event
        assert await source.ended() == 0, source.said()
        await there.execute("quit")
        assert await target.ended() == 0, target.said()


async def called_off(vmferry, folder, kind):
    async with contextlib.AsyncExitStack() as stack:
        _, client = await source_of(vmferry, folder, kind, stack)
        target, _, uri = await target_of(vmferry, folder, "target", kind, stack)
        await set_capabilities(client, events=True)
        watcher = Watcher(client)
        await client.execute("migrate-set-parameters", {"max-bandwidth": 4_000_000})
        await client.execute("migrate", {"uri": uri})
        await watcher.wait("MIGRATION_PASS", **{"pass": 1})
        await client.execute("migrate_cancel")
        await watcher.wait("MIGRATION", status="cancelled")
        assert watcher.statuses() == ["setup", "active", "cancelling", "cancelled"], watcher.seen
        assert (await client.execute("query-migrate"))["status"] == "cancelled"
        assert await client.execute("query-status") == {"running": True, "status": "running"}
        await target.ended()
        # No process listens at this address.
        await client.execute("migrate", {"uri": "unix:/nonexistent/x"})
        await watcher.wait("MIGRATION", status="failed")
        info = await client.execute("query-migrate")
        assert info["status"] == "failed" and "connect" in info["error-desc"], info
        assert await client.execute("query-status") == {"running": True, "status": "running"}


class Forwarder:
    """Forwards connections to a target, and slows what the source sends.

    The forwarder runs in the event loop of the clients: while they get no processor time, no byte of
    the guest moves. Therefore a postcopy through the forwarder cannot end before the clients have
    seen it.
    """

    CHUNK = 16 << 10

    def __init__(self, uri):
        _, host, port = uri.split(":")
        self.target = (host, int(port))
        # Seconds between two chunks of a connection.
        self.delay = 0
        self.tasks = set()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        self.uri = "tcp:127.0.0.1:%d" % self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def accept(self, reader, writer):
        self.tasks.add(asyncio.current_task())
        with contextlib.suppress(OSError), contextlib.closing(writer):
            there, back = await asyncio.open_connection(*self.target)
            with contextlib.closing(back):
                await asyncio.gather(self.pump(reader, back, True), self.pump(there, writer, False))
        self.tasks.discard(asyncio.current_task())

    async def pump(self, reader, writer, slowed):
        try:
            while chunk := await reader.read(self.CHUNK):
                writer.write(chunk)
                await writer.drain()
                if slowed:
                    await asyncio.sleep(self.delay)
            writer.write_eof()
        except OSError:
            writer.close()


async def by_postcopy(vmferry, folder, kind):
    async with contextlib.AsyncExitStack() as stack:
        _, client = await source_of(vmferry, folder, kind, stack)
        _, there, uri = await target_of(vmferry, folder, "target", kind, stack)
        for each in (client, there):
            await set_capabilities(each, events=True, postcopy_ram=True, postcopy_blocktime=True)
        watcher, arriving = Watcher(client), Watcher(there)
        way = await stack.enter_async_context(Forwarder(uri))
        # The limit is so low that precopy does not converge: the guest writes all of its 16 MB in a
        # pass.
        rates = {"max-bandwidth": 8_000_000, "max-postcopy-bandwidth": 8_000_000}
        await client.execute("migrate-set-parameters", rates)
        await client.execute("migrate", {"uri": way.uri})
        await watcher.wait("MIGRATION_PASS", **{"pass": 1})
        await client.execute("migrate-start-postcopy")
        await watcher.wait("MIGRATION", status="postcopy-active")
        # With at most 50 chunks per second on each channel, 16 MB take five seconds, even if the
        # guest requests all pages.
        way.delay = 0.02
        await arriving.wait("RESUME")
        info = await client.execute("query-migrate")
        assert info["status"] == "postcopy-active" and whole("ram", info["ram"])["multifd-bytes"] == 0, info
        whole("ram", (await there.execute("query-migrate"))["ram"])
        assert await client.execute("query-status") == {"running": False, "status": "postmigrate"}
        assert (await there.execute("query-status"))["running"] is True
        await refused(client, "migrate_cancel", "too late")
        # The operator cuts the link and takes it up again, with out-of-band commands as tools do.
        await client.execute_msg(client.make_execute_msg("migrate-pause", oob=True))
        await watcher.wait("MIGRATION", status="postcopy-paused")
        assert (await client.execute("query-migrate"))["status"] == "postcopy-paused"

        async def paused():
            return (await there.execute("query-migrate"))["status"] == "postcopy-paused"

        await until("the target noticing", paused)
        await there.execute_msg(there.make_execute_msg("migrate-recover", {"uri": uri}, oob=True))
        way.delay = 0
        await client.execute("migrate", {"uri": way.uri, "resume": True})
        await watcher.wait("MIGRATION", status="completed")
        await arriving.wait("MIGRATION", status="completed")
        assert watcher.statuses()[-4:] == ["postcopy-active", "postcopy-paused", "postcopy-active", "completed"]
        info = await client.execute("query-migrate")
        assert info["status"] == "completed" and len(info["postcopy-vcpu-blocktime"]) == 1, info
        assert whole("ram", info["ram"])["postcopy-bytes"] > 1 << 20, info


async def vcpu_limits(vmferry, folder, kind):
    """Tests that one vCPU keeps its limit while the other is unlimited."""
    if kind == "process" or not await has_rings(vmferry):
        print(f"qemu.qmp: vcpu_limits, {kind} guest: there are no dirty rings: only that it is refused")
        async with contextlib.AsyncExitStack() as stack:
            _, client = await source_of(vmferry, folder, kind, stack)
            await refused(client, "set-vcpu-dirty-limit", "dirty rings", {"dirty-rate": 5})
            assert await client.execute("query-vcpu-dirty-limit") == []
        return
    async with contextlib.AsyncExitStack() as stack:
        _, client = await source_of(vmferry, folder, kind, stack, "--dirty-ring", "4096", "--cpus", "2")
        assert len(await client.execute("query-cpus-fast")) == 2
        await refused(client, "set-vcpu-dirty-limit", "no vCPU 2", {"cpu-index": 2, "dirty-rate": 5})
        await refused(client, "set-vcpu-dirty-limit", "at least 1", {"dirty-rate": 0})
        # A limit above the reachable rate reports the unlimited rate.
        await client.execute("set-vcpu-dirty-limit", {"dirty-rate": 4000})

        async def rates(at_least):
            limits = await client.execute("query-vcpu-dirty-limit")
            found = [limit["current-rate"] for limit in limits]
            return found if all(rate >= at_least for rate in found) else None

        first, second = await until("both rates", lambda: rates(2))
        limit = max(1, min(first, second) // 4)
        await client.execute("set-vcpu-dirty-limit", {"cpu-index": 0, "dirty-rate": limit})
        await client.execute("cancel-vcpu-dirty-limit", {"cpu-index": 1})
        [only] = await client.execute("query-vcpu-dirty-limit")
        assert (only["cpu-index"], only["limit-rate"]) == (0, limit), only

        async def held():
            [only] = await client.execute("query-vcpu-dirty-limit")
            return only["current-rate"] <= max(2 * limit, limit + 1)

        await until("vCPU 0 at its limit", held)
        await client.execute("cancel-vcpu-dirty-limit")
        assert await client.execute("query-vcpu-dirty-limit") == []
        print(f"qemu.qmp: vCPU 0 held to {limit} MB/s of the {first} that it dirtied")


async def has_rings(vmferry):
    check = asyncio.to_thread(subprocess.run, [vmferry, "check"], stdout=subprocess.PIPE, check=False)
    checked = (await check).stdout.decode()
    return any(line.startswith("yes") and "dirty rings" in line for line in checked.splitlines())


async def many_clients(vmferry, folder, kind):
    async with contextlib.AsyncExitStack() as stack:
        guest, _ = await source_of(vmferry, folder, kind, stack)
        clients = await asyncio.gather(*(guest.connect(f"client {n}") for n in range(12)))

        async def ask(client):
            for _ in range(50):
                assert (await client.execute("query-status"))["running"]

        await asyncio.gather(*(ask(client) for client in clients))
        await asyncio.gather(*(client.disconnect() for client in clients))


async def by_shell(vmferry, folder, kind):
    """Tests qmp-shell with typed commands."""
    async with contextlib.AsyncExitStack() as stack:
        guest, client = await source_of(vmferry, folder, kind, stack)
        lines = "query-status\nmigrate uri=http://x\nstop\nmigrate-set-parameters downtime-limit=77\nnothing\n"
        shell = await asyncio.create_subprocess_exec(
            os.path.join(os.path.dirname(sys.executable), "qmp-shell"),
            guest.api,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "HOME": folder},
        )
        out, _ = await asyncio.wait_for(shell.communicate(lines.encode()), PATIENCE)
        text = out.decode()
        for words in ["Connected to QEMU", "'status': 'running'", "'return': {}", "scheme", "CommandNotFound"]:
            assert words in text or words.replace("'", '"') in text, f"{words} in {text}"
        assert (await client.execute("query-status"))["status"] == "paused", text
        assert (await client.execute("query-migrate-parameters"))["downtime-limit"] == 77


TESTS = [a_migration, called_off, by_postcopy, vcpu_limits, many_clients, by_shell]


async def one(vmferry, kind, test):
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        try:
            await test(vmferry, folder, kind)
        except Exception:
            for name in os.listdir(folder):
                if name.endswith(".log"):
                    with open(os.path.join(folder, name), errors="replace") as log:
                        print(f"{name}: {log.read()}", file=sys.stderr)
            print(f"{test.__name__} failed for a {kind} guest", file=sys.stderr)
            raise
        print(f"qemu.qmp: {test.__name__}, {kind} guest: passed, {time.monotonic() - began:.1f} s")


async def main():
    """Runs all tests at once: they wait most of the time."""
    vmferry, *kinds = sys.argv[1:]
    await asyncio.gather(*(one(vmferry, kind, test) for kind in kinds for test in TESTS))


asyncio.run(main())
