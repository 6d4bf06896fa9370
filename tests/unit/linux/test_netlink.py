"""Messages byte for byte, as strace shows those of ip(8); addresses of slots; the table as text."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from opendsec.linux import netlink
from opendsec.linux.network import SandboxNetwork


def test_an_address_message() -> None:
    kind, flags, body = netlink.new_address(7, IPv4Address("10.0.0.1"), 31)
    assert (kind, flags) == (20, 0x600)
    assert body.hex() == "021f00000700000008000200" + "0a000001" + "08000100" + "0a000001"


def test_a_default_route_message() -> None:
    kind, _, body = netlink.new_default_route(2, IPv4Address("10.0.0.0"))
    assert kind == 24
    assert body.hex() == "02000000fe03000100000000" + "080005000a000000" + "0800040002000000"


def test_names_are_padded_to_four_bytes() -> None:
    _, _, body = netlink.delete_link("ods-1")
    assert body[16:].hex() == "0a000300" + b"ods-1\0".hex() + "0000"
    assert len(netlink.new_veth("ods-1", peer="eth0", peer_index=2, peer_netns=9)[2]) % 4 == 0


def test_slots_have_pairs_of_addresses() -> None:
    network = SandboxNetwork(state_file=Path("/x"), prefix=IPv4Network("10.209.0.0/16"))
    assert network.addresses(0) == (IPv4Address("10.209.0.0"), IPv4Address("10.209.0.1"))
    assert network.addresses(32_767) == (IPv4Address("10.209.255.254"), IPv4Address("10.209.255.255"))
    for slot in (-1, 32_768):
        with pytest.raises(ValueError, match="no addresses"):
            network.addresses(slot)


def test_the_table_names_its_links_and_prefix() -> None:
    rules = SandboxNetwork(state_file=Path("/x"), links="ods-t", table="opendsec_mine").rules()
    assert rules.startswith("add table inet opendsec_mine\ndelete table inet opendsec_mine\ntable inet opendsec_mine {")
    assert 'ip saddr 10.209.0.0/16 oifname != "ods-t*" masquerade' in rules
    assert "169.254.0.0/16 drop" in rules
    with pytest.raises(ValueError, match="links"):
        SandboxNetwork(state_file=Path("/x"), links="much-too-long")
