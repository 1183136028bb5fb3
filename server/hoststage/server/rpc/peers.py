"""Which processes may map memory, by what the kernel says of them."""

from __future__ import annotations

from dataclasses import dataclass

from hoststage.shm.peer import PeerCredentials


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """Users and groups that may use the fd socket and the lane; both empty: whoever may open the socket file.

    A process of another user namespace shows uid 65534, which names nobody: it passes only where the handshake
    demanded a token (`token_demanded`), which its session then presented.
    """

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    token_demanded: bool = False

    def refusal(self, peer: PeerCredentials) -> str:
        """Return why the peer may not, "" where it may."""
        if not self.uids and not self.gids:
            return ""
        if not peer.identifies_user:
            if self.token_demanded:
                return ""
            return (
                "the process is of another user namespace; set auth.token_file on the daemon, or clear auth.allow_uids"
            )
        if peer.uid in self.uids or peer.gid in self.gids:
            return ""
        return f"uid {peer.uid}, gid {peer.gid} are in neither auth.allow_uids nor auth.allow_gids"
