"""The blocks of a model, where lists hold modules that are never called."""

from torch import nn

from graphs.fsdp.module_blocks import default_groups, is_container, listed_blocks


def test_members_that_are_never_called_are_replaced_by_those_that_are():
    level = nn.Module()
    level.inside = nn.Linear(2, 2)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.GELU()]), level])
    assert tuple(listed_blocks(model)) == ("layers.0.0", "layers.0.1", "layers.1.inside")
    assert default_groups(model) == ("layers.0.0", "layers.1.inside")


def test_a_list_with_a_forward_is_called():
    class InTurn(nn.ModuleList):
        def forward(self, x):
            for each in self:
                x = each(x)
            return x

    assert is_container(nn.ModuleDict())
    assert not is_container(InTurn())
