"""A method's part for novel devices, which join after the training and learn only their own tensors.

`Method.groups` lets everything that devices share stand still; the phases and the server's rule follow from that here.
"""

import msgspec

from fedvit.methods.base import Method, ServerRule
from fedvit.methods.rules.nothing import Nothing
from fedvit.models.vit import PatchViT
from fedvit.program import Train


def phases_of(method: Method, vit: PatchViT) -> tuple[Train, ...]:
    """The phases of a round. On a novel device a phase moves the groups that are its own, and collects nothing; a phase
    without such a group is left out. Methods that keep nothing on devices have no phase then.
    """
    phases = method.phases(vit)
    if not method.novel:
        return phases
    trained = {group for group, (role, names) in method.groups(vit).items() if role.is_trained_on_device and names}
    own = [(phase, tuple(group for group in phase.groups if group in trained)) for phase in phases]
    return tuple(msgspec.structs.replace(phase, groups=groups, collect=None) for phase, groups in own if groups)


def server_rule_of(method: Method, vit: PatchViT) -> ServerRule:
    """The server's half. For novel devices it is what learns their embeddings, or nothing."""
    rule = method.server_rule(vit)
    return (rule.for_novel(method.novel) or Nothing()) if method.novel else rule
