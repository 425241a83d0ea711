"""boxctl: the operator's command for one host and its coordinator. A client only.

It talks to the daemons' sockets and to the coordinator's REST, and starts daemons as processes by name.

main.py                         the commands, and the border where every failure becomes words and an exit code
up.py  down.py  daemons.py      from nothing to a first box, and back; daemons as processes
status.py  connect.py  doctor.py    what runs; how an agent reaches it; is this host fit
boxes.py > attach.py  terminal.py  copying.py  unpack.py    boxes; streams, terminals and files in and out of them
images.py  keys.py  nodes.py    the image, API keys, the fleet
api.py  coordinator.py          one daemon over HTTP; what the coordinator is asked
failure.py  show.py             what went wrong; how things are shown

stdout is data, stderr is talk. Exit codes: 0 done, 1 failed, 2 usage, 3 not running, 4 not found, 130 interrupted; `box exec` passes on
its command's own.
"""
