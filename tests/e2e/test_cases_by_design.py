"""Where each case of public bug reports has its test, and why some of them cannot occur.

B018, a late commit of an earlier try completes a newer one: there is nothing to complete. A client
fills its own staging memory and no room is reserved in the pool before `Commit`, which reserves,
copies and seals in one call; a call of a session that is over is refused by its token.

B067, docker's 64 MiB /dev/shm: a memfd lies on no mount that could be small. It is allocated before
it is touched all the same, so that a lack of memory is an error and no SIGBUS.

B076, huge pages that are not there: there is no hugetlb option. Ordinary pages are asked to become
huge ones, as far as the kernel has any, and what came of it is reported.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
COMMITS = "unit/server/tiering/test_commits.py"
AT_ONCE = "unit/server/tiering/test_commits_at_once.py"
NAMESPACES = "unit/server/service/test_namespaces.py"
SERVICE = "unit/server/service/test_block_service.py"
MEMORY = "e2e/test_memory_limits.py"
AGAIN = "e2e/test_client_again.py"
DEATH = "crash/test_client_death.py"
DIRECTORY = "e2e/test_nvme_directory.py"
TIERS = "unit/server/tiering/test_tier_cases.py"
TICKETS = "e2e/test_many_tickets.py"
CALLS = "e2e/test_call_cases.py"
RECLAIM = "unit/server/tiers/nvme/test_reclaim.py"

CASES = {
    "B003": (AT_ONCE, "test_nobody_sees_a_block_that_is_still_copied"),
    "B004": (AGAIN, "test_a_restarted_engine_finds_exactly_what_it_stored"),
    "B007": (AT_ONCE, "test_what_is_committed_is_the_copy"),
    "B010": (AGAIN, "test_an_engine_that_differs_in_anything_misses"),
    "B012": (COMMITS, "test_ranks_do_not_collide"),
    "B013": (DIRECTORY, "test_another_layout_on_an_old_directory_misses"),
    "B015": ("unit/client/test_chain_hash.py", "test_b015_keys_are_the_same_in_every_process"),
    "B016": (DIRECTORY, "test_a_truncated_segment_lists_nothing_that_it_has_not"),
    "B017": (RECLAIM, "test_a_segment_that_goes_while_it_is_read_keeps_its_file_until_then"),
    "B018": (DEATH, "test_a_stopped_client_gives_back_all_after_the_timeout"),
    "B020": (TIERS, "test_a_block_is_all_of_its_groups_or_nothing"),
    "B021": (SERVICE, "test_an_offset_outside_staging_or_off_the_grid_is_refused"),
    "B022": (DIRECTORY, "test_corrupt_records_are_misses_and_then_plain_misses"),
    "B024": (NAMESPACES, "test_short_keys_are_always_refused_naming_what_is_allowed"),
    "B027": (
        "unit/server/tiering/test_leases.py",
        "test_releasing_twice_or_after_the_end_is_no_error",
    ),
    "B029": (DEATH, "test_free_bytes_are_the_same_after_many_deaths"),
    "B030": (TIERS, "test_a_lease_on_what_came_from_nvme_outlives_its_time"),
    "B031": (TICKETS, "test_b031_cancelled_calls_keep_nothing"),
    "B032": (TICKETS, "test_b032_misses_leave_nothing_behind"),
    "B033": (COMMITS, "test_replacing_the_same_keys_for_ever_costs_no_memory"),
    "B036": (TICKETS, "test_b036_more_loads_than_readers_wait_and_do_not_fail"),
    "B037": (COMMITS, "test_five_times_the_capacity_stays_within_bounds"),
    "B038": (COMMITS, "test_refused_for_room_then_stored_once"),
    "B039": (TIERS, "test_what_was_demoted_last_does_not_leave_first"),
    "B040": ("e2e/test_operator_commands.py", "test_workers_that_store_read_and_remove"),
    "B041": (TIERS, "test_a_parent_that_leaves_while_its_children_are_on_their_way"),
    "B042": (COMMITS, "test_a_hit_that_vanishes_is_a_clean_miss"),
    "B043": (SERVICE, "test_a_budget_shortens_the_lease_and_not_the_hit"),
    "B044": (NAMESPACES, "test_an_oversize_block_is_refused_naming_the_limit"),
    "B045": (DIRECTORY, "test_all_is_there_after_a_clean_restart"),
    "B047": (DIRECTORY, "test_three_times_the_limit_with_default_policies_evicts"),
    "B055": (DIRECTORY, "test_three_times_the_limit_with_default_policies_evicts"),
    "B059": (DIRECTORY, "test_all_is_there_after_a_clean_restart"),
    "B061": (DIRECTORY, "test_other_sizes_after_a_restart"),
    "B062": (TICKETS, "test_b062_a_daemon_that_goes_while_a_batch_is_stored"),
    "B064": (AGAIN, "test_the_pool_stays_when_clients_end"),
    "B066": (MEMORY, "test_a_pool_above_the_cgroup_is_refused_at_start"),
    "B067": ("unit/server/core/test_memfd.py", "test_no_room_is_an_error_and_leaves_nothing"),
    "B069": (DIRECTORY, "test_while_it_is_away_calls_fail_at_once_and_then_go_on"),
    "B070": (CALLS, "test_b070_a_client_that_dies_with_much_memory_holds_up_nobody"),
    "B071": (DEATH, "test_a_client_that_dies_before_its_first_use_holds_nothing"),
    "B072": ("e2e/test_entry_points.py", "test_a_signal_ends_it_without_residue"),
    "B073": (MEMORY, "test_restarts_in_a_tight_cgroup"),
    "B074": (
        "unit/server/core/test_memory_limit.py",
        "test_half_of_a_container_of_1_gib_is_512_mib",
    ),
    "B075": (MEMORY, "test_the_pool_takes_what_was_configured_whatever_the_block_size"),
    "B076": ("unit/server/core/test_memfd.py", "test_without_huge_pages_it_works_as_well"),
    "B077": (TIERS, "test_a_full_pool_and_full_staging_do_not_starve_reads_from_nvme"),
    "B078": (CALLS, "test_b078_large_messages_do_not_block_the_loop"),
    "B079": (CALLS, "test_b079_what_is_above_the_limit_is_refused_at_once"),
    "B081": (CALLS, "test_b081_a_storm_of_connections_leaves_the_listener_alive"),
    "B082": (CALLS, "test_b082_the_daemon_never_forks"),
    "B083": (CALLS, "test_b083_pings_of_an_idle_client_end_nothing"),
    "B095": (TICKETS, "test_b095_read_on_another_connection_what_is_just_being_written"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_case_has_its_test(case):
    file, name = CASES[case]
    tree = ast.parse((TESTS / file).read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name in tests
