"""The first epoch in windows: every document once, and the same packs however units arrive."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.buckets import plan_units
from dflash_fit.packing import Pack, fill, plan_epoch, slots
from dflash_fit.windows import Windows


@st.composite
def grown(draw):
    """A plan that was made unit by unit, with the documents of its units."""
    budget = draw(st.integers(8, 120))
    lengths = draw(st.lists(st.integers(1, budget), max_size=60))
    documents, units = list(draw(st.permutations(range(len(lengths))))), []
    while documents:
        size = draw(st.integers(0, 8))  # 0: a unit whose documents are all held out
        units.append(documents[:size])
        documents = documents[size:]
    options = {"token_budget": budget, "seed": draw(st.integers(0, 9))}
    return lengths, units, options, draw(st.integers(1, 6))


def planned(lengths, units, options, size) -> Windows:
    windows = Windows(lengths, packs=size, **options)
    for documents in units:
        windows.add(documents)
    windows.finish()
    return windows


@given(grown())
def test_every_document_of_the_units_is_in_exactly_one_pack(case):
    packs = planned(*case).packs
    wanted = sorted(document for unit in case[1] for document in unit)
    assert sorted(document for pack in packs for document in pack.documents) == wanted


@given(grown())
def test_documents_of_a_pack_lie_in_the_budget_without_overlap(case):
    lengths, _, options, _ = case
    for pack in planned(*case).packs:
        end = 0
        for document, start in zip(pack.documents, pack.starts, strict=True):
            assert start == end
            assert start + lengths[document] <= options["token_budget"]
            end = start + slots(lengths[document])


@given(grown())
def test_a_pack_once_planned_never_changes_and_names_only_units_that_are_there(case):
    lengths, units, options, size = case
    windows, seen, added = Windows(lengths, packs=size, **options), list[Pack](), set()
    for documents in units:
        windows.add(documents)
        added |= set(documents)
        assert windows.packs[: len(seen)] == seen
        seen = list(windows.packs)
        assert {d for pack in seen for d in pack.documents} <= added
    windows.finish()
    assert windows.packs[: len(seen)] == seen


@given(grown())
def test_a_window_is_planned_as_soon_as_its_documents_fill_it(case):
    lengths, units, options, size = case
    windows = Windows(lengths, packs=size, **options)
    for documents in units:
        before = {d for pack in windows.packs for d in pack.documents}
        waiting = {d for unit in units[: windows.units] for d in unit} - before
        windows.add(documents)
        full = sum(slots(lengths[d]) for d in [*waiting, *documents])
        grew = len(before) < sum(len(pack.documents) for pack in windows.packs)
        assert grew == (full >= size * options["token_budget"])


@given(grown())
def test_the_units_of_a_pack_are_those_that_were_there_when_it_was_planned(case):
    lengths, units, options, size = case
    windows, wanted = Windows(lengths, packs=size, **options), []
    for documents in units:
        windows.add(documents)
        wanted += [windows.units] * (len(windows.packs) - len(wanted))
    windows.finish()
    wanted += [len(units)] * (len(windows.packs) - len(wanted))
    assert [windows.units_of(count + 1) for count in range(len(wanted))] == wanted


def test_windows_in_order_of_the_units_fill_their_packs_nearly_as_well_as_a_whole_epoch():
    lengths = [20 + (i * 7919) % 4000 for i in range(4000)]
    units = plan_units(lengths, edges=[770, 1216, 1728, 2432, 3296, 8193], unit_tokens=32768)
    windows = planned(
        lengths, [unit.members for unit in units], {"token_budget": 49152, "seed": 0}, 16
    )
    whole = plan_epoch(range(4000), lengths, token_budget=49152, seed=0, epoch=0)
    found, best = (fill(packs, lengths, token_budget=49152) for packs in (windows.packs, whole))
    assert found > 0.98, (found, best)
    assert len(windows.packs) <= 1.02 * len(whole)


def test_packs_of_a_window_are_not_in_the_order_of_their_lengths():
    lengths = [100] * 50 + [200] * 50
    windows = planned(lengths, [range(100)], {"token_budget": 1000, "seed": 0}, 4)
    order = [document for pack in windows.packs for document in pack.documents]
    assert order != sorted(order)
    other = planned(lengths, [range(100)], {"token_budget": 1000, "seed": 1}, 4)
    assert other.packs != windows.packs
