#!/usr/bin/env python3
"""The bare sequence that our starts, freezes and thaws are measured against; it shares no code with them. As root:

    bare.py IMAGE_FOLDER TEMPLATE_FOLDER [ROUNDS]      -> JSON, lists of seconds
        start    copy the RAM file, spawn QEMU, load, cont, until boxd has answered its restore
        freeze   stop, save, kill
        thaw     spawn, load, cont, until boxd has answered its restore and one exec
"""

import base64
import ctypes
import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BOARD = "microvm,acpi=on,rtc=on,pit=on,pic=on,ioapic2=on,pcie=off,usb=off,isa-serial=on"
BOARD += ",auto-kernel-cmdline=off,mem-merge=off,dump-guest-core=off"
NETWORK = """ip tuntap add tap0 mode tap vnet_hdr; ip link set tap0 address 02:00:00:00:00:01 up; ip addr add 10.111.0.1/30 dev tap0
ip neigh replace 10.111.0.2 lladdr 02:00:00:00:00:02 dev tap0 nud permanent"""


class Vm:
    def __init__(self, image: Path, template: Path, home: Path, state: Path, shape: tuple[int, int, str]) -> None:
        memory_mib, vcpus, accel = shape
        argv = f"""qemu-system-x86_64 -machine {BOARD},memory-backend=ram -accel {accel} -cpu max -smp {vcpus} -m {memory_mib}M
            -nodefaults -no-user-config -display none -no-reboot -incoming defer -S -serial null -global virtio-mmio.force-legacy=false
            -object memory-backend-file,id=ram,size={memory_mib}M,mem-path={home}/ram,share=on
            -chardev socket,id=q,path={home}/qmp,server=on,wait=off -mon chardev=q,mode=control
            -blockdev driver=raw,node-name=base,read-only=on,file.driver=file,file.filename={image}/disk.raw
            -blockdev driver=qcow2,node-name=t,read-only=on,file.driver=file,file.filename={template}/disk.qcow2,backing=base
            -blockdev driver=qcow2,node-name=b,file.driver=file,file.filename={home}/disk,backing=t
            -device virtio-blk-device,id=root,drive=b,serial=root
            -blockdev driver=raw,node-name=w,file.driver=file,file.filename={home}/work
            -device virtio-blk-device,id=work,drive=w,serial=work
            -netdev tap,id=net,ifname=tap0,script=no,downscript=no
            -device virtio-net-device,id=card,netdev=net,mac=02:00:00:00:00:02
            -device virtio-rng-device,id=rng -device virtio-balloon-device,id=balloon,free-page-reporting=on"""
        self.process, self.qmp = subprocess.Popen(argv.split()), socket.socket(socket.AF_UNIX)
        while self.qmp.connect_ex(f"{home}/qmp"):
            time.sleep(0.001)
        self.lines = self.qmp.makefile("r")
        self.command("qmp_capabilities")
        self.command("migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": True}])
        self.command("migrate-incoming", uri=f"file:{state}")
        while self.command("query-status")["status"] == "inmigrate":
            time.sleep(0.001)
        self.command("cont")

    def command(self, name: str, **arguments: Any) -> Any:
        self.qmp.sendall(json.dumps({"execute": name, "arguments": arguments}).encode())
        while "return" not in (reply := json.loads(self.lines.readline())):
            assert "error" not in reply, reply
        return reply["return"]

    def freeze(self, state: Path) -> None:
        self.command("stop")
        self.command("migrate", uri=f"file:{state}")
        while self.command("query-migrate").get("status") != "completed":
            time.sleep(0.001)
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def ask(path: str, token: str, body: dict[str, Any]) -> None:
    link = http.client.HTTPConnection("10.111.0.2", 7070, timeout=60)
    link.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {token}", "Content-Type": "application/json"})
    answer = link.getresponse()
    text = answer.read()
    assert answer.status < 300, text
    link.close()


def restore(generation: int, token: str) -> None:
    seed = base64.b64encode(os.urandom(64)).decode()
    ask("/v1/restore", token, {"generation": generation, "token": token, "entropy": seed, "realtime": time.time()})


def one_round(image: Path, template: Path, home: Path, shape: tuple[int, int, str], token: str) -> list[float]:
    for name, copy in ("disk.qcow2", "disk"), ("work.raw", "work"):
        subprocess.run(["cp", "--sparse=always", template / name, home / copy], check=True)
    times = [time.monotonic()]
    subprocess.run(["cp", "--sparse=always", "--reflink=auto", template / "ram", home / "ram"], check=True)
    vm = Vm(image, template, home, template / "state", shape)
    restore(1, token)
    times.append(time.monotonic())
    vm.freeze(home / "state")
    times.append(time.monotonic())
    vm = Vm(image, template, home, home / "state", shape)
    restore(2, token)
    ask("/v1/commands?waitSec=30", token, {"execId": "bare", "cmd": "true", "cwd": "/"})
    times.append(time.monotonic())
    vm.kill()
    return [after - before for before, after in itertools.pairwise(times)]


if __name__ == "__main__":
    image, template, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int([*sys.argv, "20"][3])
    manifest, token = json.loads((template / "snapshot.json").read_text()), (template / "token").read_text()
    shape = manifest["memory_mib"], manifest["vcpus"], {"tcg": "tcg,thread=multi,tb-size=256", "kvm": "kvm"}[manifest["accel"]]
    assert ctypes.CDLL(None).unshare(0x40000000) == 0  # CLONE_NEWNET: a network of its own, gone with this process
    subprocess.run(NETWORK, shell=True, check=True)
    results = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=template.parent) as home:
            results.append(one_round(image, template, Path(home), shape, token))
    print(json.dumps(dict(zip(("start", "freeze", "thaw"), map(list, zip(*results, strict=True)), strict=True))))
