"""The mesh axes of a collective, from every form in which a program's text gives its groups."""

import pytest

from megajax.planning.program.hlo import groups_of

MESH = {"pipeline": 2, "data": 4, "expert": 1, "context": 1, "tensor": 2}
NAMED = "mesh['pipeline'=2,'data'=4,'expert'=1,'context'=1,'tensor'=2]"

FORMS = {
    "innermost axis, listed": ("replica_groups={{0,1},{2,3},{4,5},{6,7},{8,9},{10,11},{12,13},{14,15}}", "tensor", 2),
    "middle axis, listed": ("replica_groups={{0,2,4,6},{1,3,5,7},{8,10,12,14},{9,11,13,15}}", "data", 4),
    "members in another order": ("replica_groups={{6,0,4,2},{1,5,3,7},{14,8,10,12},{9,11,13,15}}", "data", 4),
    "everyone, not listed": ("replica_groups={}", "pipeline+data+tensor", 16),
    "innermost axis, counted": ("replica_groups=[8,2]<=[16]", "tensor", 2),
    "middle axis, counted": ("replica_groups=[4,4]<=[2,4,2]T(0,2,1)", "data", 4),
    "outermost axis, counted": ("replica_groups=[8,2]<=[2,8]T(1,0)", "pipeline", 2),
    "outer and inner axis, counted": ("replica_groups=[4,4]<=[2,4,2]T(1,0,2)", "pipeline+tensor", 4),
    "half an axis, counted": ("replica_groups=[8,2]<=[2,4,2]T(0,2,1)", "data (part)", 2),
    "one axis, named": (f"replica_groups={NAMED} {{'tensor'}}", "tensor", 2),
    "two axes, named": (f"replica_groups={NAMED} {{'data','tensor'}}", "data+tensor", 8),
    "an axis of one device, named": (f"replica_groups={NAMED} {{'expert'}}", "", 1),
    "the outer half of an axis, named": (f"replica_groups={NAMED} {{'data':(1)2}}", "data (part)", 2),
    "the whole axis by halves, named": (f"replica_groups={NAMED} {{'data':(2)2,'data':(1)2}}", "data", 4),
    "another mesh's names": ("replica_groups=mesh['a'=8,'b'=2] {'a'}", "pipeline+data", 8),
    "named, in another order": ("replica_groups=mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'b'}", "pipeline", 2),
    "ring": ("source_target_pairs={{0,8},{8,0},{1,9},{9,1}}", "pipeline", 2),
    "open chain": ("source_target_pairs={{0,2},{2,4},{4,6},{8,10},{10,12},{12,14}}", "data", 4),
    "across two axes": ("source_target_pairs={{0,3},{3,0}}", "data+tensor", 8),
    "nothing moves": ("source_target_pairs={{0,0},{1,1}}", "", 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_axes(form: str) -> None:
    attributes, name, size = FORMS[form]
    groups = groups_of(f"), channel_id=1, {attributes}, use_global_device_ids=true, dimensions={{0}}", MESH)
    assert (groups.name, groups.size) == (name, size)


def test_an_unknown_form_is_an_error() -> None:
    with pytest.raises(ValueError, match="can't be read"):
        groups_of("), replica_groups=somehow", MESH)
