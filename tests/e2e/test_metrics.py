"""P27, by the real thing: pages add up under load, names are no series, kills are survived."""

import contextlib
import random
import signal
import socket
import threading
import time

import pytest

import kvkeep
from tests.fakes.daemon_process import DaemonProcess, running_daemon
from tests.fakes.generated_blocks import chain_keys, spec, store_chain
from tests.fakes.scraping import WAIT_S, Page, free_port, get, port_in, scrape

SCRAPED = '[metrics]\nlisten = "127.0.0.1:0"\n'
# Small enough that the load evicts, and that acquires are refused.
LOADED = '[ram]\nsize = "8MiB"\nslab = "256KiB"\n[leases]\nleases_max = 3\n' + SCRAPED
MANY = (
    '[ram]\nsize = "16MiB"\n[limits]\nnamespaces_max = 16384\nsession_namespaces_max = 16384\n'
    "session_shards_max = 16384\n" + SCRAPED
)
BLOCK_NBYTES = 16 * 1024
BLOCKS = 16
CHAINS = 60


def engine(runtime_dir, seed: int, over: threading.Event) -> None:
    """Reads, stores, and asks for more leases than there are, until it is over."""
    source = random.Random(seed)
    with kvkeep.connect(runtime_dir, timeout_s=WAIT_S) as client, contextlib.ExitStack() as held:
        namespace = client.open_namespace(spec(BLOCK_NBYTES))
        while not over.is_set():
            keys = chain_keys(source.randrange(CHAINS), BLOCKS)
            match source.randrange(5):
                case 0 | 1:
                    store_chain(namespace, keys)
                case 2 | 3:
                    namespace.lookup(keys)
                case _:
                    try:
                        held.enter_context(namespace.acquire(keys))
                    except kvkeep.KVKeepError:
                        held.close()


@contextlib.contextmanager
def engines(runtime_dir, count: int):
    over, failures = threading.Event(), []

    def run(seed: int) -> None:
        try:
            engine(runtime_dir, seed, over)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []


@pytest.mark.promise("P27", gate=30, nightly=10_000, unit="different pages that add up")
def test_every_page_adds_up_under_load(tmp_path, promise_count):
    with running_daemon(tmp_path, LOADED) as daemon:
        port, seen, pages = port_in(daemon.log), {}, 0
        with engines(daemon.runtime_dir, 2) as failures:
            page = scrape(port)
            # As many as were asked for, and until everything that is told apart has happened.
            while pages < promise_count or not eventful(page):
                page = scrape(port)
                counters = dict(page.counters())
                fell = [series for series, v in seen.items() if counters.get(series, 0.0) < v]
                assert not fell
                assert not failures
                pages += changed(counters) != changed(seen)
                seen = counters
        daemon.check_log()


def changed(counters: dict) -> dict:
    """Without what the kernel counts, which may differ where the readings are the same."""
    return {series: v for series, v in counters.items() if not series[0].startswith("process_")}


def eventful(page) -> bool:
    """Hits, misses, failed acquires, evictions, and blocks that were there already."""
    return all(
        (
            page.sum("kvkeep_blocks_hit_total", call="lookup"),
            page.sum("kvkeep_blocks_missed_total", call="lookup"),
            page.sum("kvkeep_blocks_failed_total", call="acquire"),
            page.sum("kvkeep_block_age_at_eviction_seconds_count"),
            page.sum("kvkeep_commit_blocks_total", status="already_stored"),
            page.sum("kvkeep_rpc_requests_total", method="BlockCache/Commit", code="OK"),
            page.sum("kvkeep_rpc_duration_seconds_count", method="BlockCache/Acquire"),
            page.sum("kvkeep_event_loop_lag_seconds_count"),
        )
    )


@pytest.mark.promise("P27", gate=1_000, nightly=10_000, unit="tenants without a series")
def test_tenants_are_no_series(tmp_path, promise_count):
    with running_daemon(tmp_path, MANY) as daemon:
        port = port_in(daemon.log)
        with kvkeep.connect(daemon.runtime_dir, timeout_s=WAIT_S) as client:
            client.open_namespace(spec(BLOCK_NBYTES, tenant="first"))
            before = page_with(port, "kvkeep_namespaces", 1)
            for number in range(promise_count):
                tenant = f'canary-{number}"}} 1\n'
                client.open_namespace(spec(BLOCK_NBYTES, tenant=tenant, model=f"canary/{number}"))
            after = page_with(port, "kvkeep_namespaces", promise_count + 1)
            assert set(after.samples) == set(before.samples)
            assert "canary" not in get(port)[1]


def page_with(port: int, name: str, value: int) -> Page:
    """A page on which a gauge has come to a value: the next one may be a moment old."""
    deadline = time.monotonic() + WAIT_S
    while (page := scrape(port)).sum(name) != value:
        assert time.monotonic() < deadline
    return page


@pytest.mark.promise("P27", gate=3, nightly=100, unit="daemons killed in a scrape")
def test_killed_in_a_scrape_it_serves_again(tmp_path, promise_count):
    port = free_port()
    daemon = DaemonProcess(
        tmp_path, f'[ram]\nsize = "16MiB"\n[metrics]\nlisten = "127.0.0.1:{port}"'
    )
    try:
        daemon.start()
        for _ in range(promise_count):
            with contextlib.ExitStack() as held:
                scrapers = [
                    held.enter_context(
                        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
                    )
                    for _ in range(5)
                ]
                for scraper in scrapers[:3]:
                    scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                daemon.kill()
            daemon.start()
            page_with(port, "kvkeep_serving", 1)
        daemon.check_log()
    finally:
        daemon.kill()


def test_a_scraper_does_not_hold_the_end_up(tmp_path):
    with running_daemon(tmp_path, LOADED) as daemon:
        port = port_in(daemon.log)
        assert get(port, "/readyz")[0] == get(port, "/healthz")[0] == 200
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as silent:
            silent.sendall(b"GET /met")
            assert daemon.end(signal.SIGTERM) == 0
            assert silent.recv(100) == b""
        daemon.check_log()


def test_a_port_that_is_taken_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = DaemonProcess(
            tmp_path, f'[metrics]\nlisten = "127.0.0.1:{port}"\n[ram]\nsize = "16MiB"'
        )
        daemon.launch()
        assert daemon.process.wait(WAIT_S) == 1
        (line,) = daemon.log.splitlines()
        assert f"metrics.listen is 127.0.0.1:{port}: Address already in use; name" in line
        assert not daemon.socket.exists()


def test_nothing_listens_unless_it_is_told(tmp_path):
    with running_daemon(tmp_path) as daemon:
        assert "metrics" not in daemon.log
