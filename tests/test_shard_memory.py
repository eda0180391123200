"""The peak of one of several processes is known from the network's alone."""

from random_shared_memory import fake_processes, shared_cases  # pyright: ignore[reportMissingImports]


def test_peaks_of_a_process_with_its_share_are_predicted_within_five_percent() -> None:
    with fake_processes():
        found = list(shared_cases(1, seed=2, settings_each=4, policies=("keep", "full")))
    assert len(found) == 4
    assert all(-0.03 < case.error < 0.05 for case in found), [(case.name, case.error) for case in found]
