#!/usr/bin/env python3
"""The bare sequence that our starts, freezes and thaws are measured against; it shares no code with them. As root:

    bare.py IMAGE_FOLDER TEMPLATE_FOLDER    for each line on stdin one round, and its seconds as a line of JSON:
        start    copy the RAM file, spawn QEMU, load, cont, until boxd has answered its restore
        freeze   stop, save, kill
        thaw     spawn, load, cont, until boxd has answered its restore and one exec
"""

import base64
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

BOARD = "microvm,acpi=on,rtc=on,pit=on,pic=on,ioapic2=on,pcie=off,usb=off,isa-serial=on"
BOARD += ",auto-kernel-cmdline=off,mem-merge=off,dump-guest-core=off,firmware=qboot.rom,memory-backend=ram"
ACCEL = {"tcg": "tcg,thread=multi,tb-size=256", "kvm": "kvm"}
NETWORK = """ip tuntap add tap0 mode tap vnet_hdr; ip link set tap0 address 02:00:00:00:00:01 up; ip addr add 10.111.0.1/30 dev tap0
ip neigh replace 10.111.0.2 lladdr 02:00:00:00:00:02 dev tap0 nud permanent"""


class Vm:
    def __init__(self, image: str, template: Path, home: Path, state: Path) -> None:
        made = json.loads((template / "snapshot.json").read_text())
        argv = f"""qemu-system-x86_64 -machine {BOARD} -accel {ACCEL[made["accel"]]} -cpu max -smp {made["vcpus"]} -m {made["memory_mib"]}M
            -nodefaults -no-user-config -display none -no-reboot -incoming defer -S -serial null -global virtio-mmio.force-legacy=false
            -object memory-backend-file,id=ram,size={made["memory_mib"]}M,mem-path={home}/ram,share=on
            -chardev socket,id=q,path={home}/qmp,server=on,wait=off -mon chardev=q,mode=control
            -blockdev driver=raw,node-name=base,read-only=on,file.driver=file,file.filename={image}/disk.raw
            -blockdev driver=qcow2,node-name=t,read-only=on,file.driver=file,file.filename={template}/disk.qcow2,backing=base
            -blockdev driver=qcow2,node-name=b,file.driver=file,file.filename={home}/disk.qcow2,backing=t
            -device virtio-blk-device,id=root,drive=b,serial=root
            -blockdev driver=raw,node-name=w,file.driver=file,file.filename={home}/work.raw
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

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def ask(path: str, body: dict[str, Any], bearer: str) -> None:
    headers = {"Authorization": f"Bearer {bearer}", "Content-Type": "application/json"}
    with urlopen(Request(f"http://10.111.0.2:7070{path}", json.dumps(body).encode(), headers), timeout=60) as answer:
        answer.read()


def restore(generation: int, token: str) -> None:
    seed = base64.b64encode(os.urandom(64)).decode()
    ask("/v1/restore", {"generation": generation, "token": token, "entropy": seed, "realtime": time.time()}, token)


def one_round(image: str, template: Path, home: Path, token: str) -> dict[str, float]:
    for name in "disk.qcow2", "work.raw":
        subprocess.run(["cp", "--sparse=always", template / name, home], check=True)
    begun = time.monotonic()
    subprocess.run(["cp", "--sparse=always", "--reflink=auto", template / "ram", home], check=True)
    vm = Vm(image, template, home, template / "state")
    restore(1, token)
    started = time.monotonic()
    for number in range(10):  # as many as our boxes have answered when they are frozen: a guest's first ones are its slowest
        ask("/v1/commands?waitSec=30", {"execId": f"bare{number}", "cmd": "true", "cwd": "/"}, token)
    worked = time.monotonic()
    vm.command("stop")
    vm.command("migrate", uri=f"file:{home}/state")
    while vm.command("query-migrate").get("status") != "completed":
        time.sleep(0.001)
    vm.kill()
    frozen = time.monotonic()
    vm = Vm(image, template, home, home / "state")
    restore(2, token)
    ask("/v1/commands?waitSec=30", {"execId": "bare", "cmd": "true", "cwd": "/"}, token)
    thawed = time.monotonic()
    vm.kill()
    return {"start": started - begun, "freeze": frozen - worked, "thaw": thawed - frozen}


if __name__ == "__main__":
    assert ctypes.CDLL(None).unshare(0x40000000) == 0  # CLONE_NEWNET: a network of its own, gone with this process
    subprocess.run(NETWORK, shell=True, check=True)
    image, template = sys.argv[1], Path(sys.argv[2])
    for _ in sys.stdin:
        with tempfile.TemporaryDirectory(dir=template.parent) as home:
            print(json.dumps(one_round(image, template, Path(home), (template / "token").read_text())), flush=True)
