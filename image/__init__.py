"""The box image: how it is made, where it is kept, and boxd, the daemon inside a box.

recipe.py      what is in an image, in one readable table
files/         plain files of the guest, a folder each flavour, by their place in it
mirror.py      where the packages come from: this host's own Debian mirror
build.py       makes one: packages, files, initramfs, disk
initramfs.py   the few modules and the script that find the disk
store.py       images on disk, by digest
boxd/          the daemon in the guest (installed there as package `boxd`)
"""
