"""`boxctl image ...`: what boxes are made of, on this host."""

from __future__ import annotations

from typing import Annotated

import typer

from image.store import ImageInUseError, ImageNotFoundError, ImageStore, StoredImage, describe_powershell
from node.cli import show
from node.cli.api import Api
from node.cli.failure import Failure, NotFound, NotRunning, WrongUsage
from node.config import Places, read_table, take

app = typer.Typer(no_args_is_help=True, help="Box images on this host.")

Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Image = Annotated[str, typer.Argument(metavar="IMAGE", help="A flavour (its newest image), or the beginning of a digest.")]


def ensure_image(places: Places, flavour: str) -> StoredImage:
    """The image of the current recipe, built if it is missing: says at once what that costs, then what is being done."""
    from image.build import BuildError, build, current_digest, estimate
    from image.recipe import FLAVOURS, Settings

    if flavour not in FLAVOURS:
        raise WrongUsage(f"there is no flavour {flavour!r}", remedy=f"Flavours: {', '.join(sorted(FLAVOURS))}.")
    settings = Settings(**take(Settings, dict(read_table(places.config).get("image", {})), "image"))
    store = ImageStore(places.images)
    try:
        image = store.show(current_digest(flavour, settings))
        warn_of_newer(image, store)
        return image
    except ImageNotFoundError:
        cost = estimate(flavour)
    show.say(f"building image {flavour}: about {cost.minutes} minutes and {cost.gigabytes:.0f} GB; interrupted, it goes on next time")
    try:
        with show.progress(f"image {flavour}") as report:
            return build(places.images, flavour, settings, report)
    except BuildError as error:
        log = "\n".join(error.log[-12:])
        raise Failure(f"the image was not built: {error}", cause=log, remedy="Mend what the log names, then the same again.") from error


def warn_of_newer(image: StoredImage, store: ImageStore) -> None:
    """The node takes the flavour's newest image. That is another one when the recipe has gone back to what it was."""
    newest = store.find(image.flavour)
    if newest and newest.digest != image.digest:
        remedy = f"`boxctl image rm {newest.digest}` makes it {image.digest}, the recipe's"
        show.warn(f"new boxes of {image.flavour} are made of image {newest.digest}, which was built later; {remedy}")


def find_image(reference: str, images: list[StoredImage]) -> StoredImage:
    """The flavour's newest image, or the one whose digest begins so."""
    found = [i for i in images if i.flavour == reference][:1] or [i for i in images if reference and i.digest.startswith(reference)]
    if not found:
        raise NotFound(f"there is no image {reference!r}", remedy="List them: `boxctl image list`; make one: `boxctl image build core`.")
    if len(found) > 1:
        raise WrongUsage(f"{reference!r} could be {len(found)} images", cause=", ".join(i.digest for i in found))
    return found[0]


@app.command()
def build(flavour: Annotated[str, typer.Argument(help="core or full")] = "full") -> None:
    """Build a flavour, unless its current image is there."""
    image = ensure_image(Places.from_environment(), flavour)
    show.say(f"image {image.flavour} {image.digest} is there, {show.size(image.bytes)}; {describe_powershell(image)}")
    show.out().print(image.digest, markup=False)


@app.command("list")
def list_images(json: Json = False) -> None:
    """The images on this host, newest first."""
    images = ImageStore(Places.from_environment().images).list()
    if json:
        show.print_json([_wire(image) for image in images])
    elif images:
        rows = ((i.flavour, i.digest, show.ago(i.built_at), show.size(i.bytes)) for i in images)
        show.print_table(("FLAVOUR", "DIGEST", "BUILT", "SIZE"), rows)
    else:
        show.say("no images; make one: `boxctl image build full`")


@app.command("show")
def show_image(image: Image, json: Json = False) -> None:
    """What is in an image."""
    found = find_image(image, ImageStore(Places.from_environment().images).list())
    if json:
        show.print_json({**_wire(found), "packages": found.manifest.get("packages", {})})
        return
    told = found.manifest
    show.print_fields(
        (
            ("flavour", found.flavour),
            ("digest", found.digest),
            ("built", show.ago(found.built_at)),
            ("size", show.size(found.bytes)),
            ("where", found.folder),
            ("Debian", told.get("suite")),
            ("kernel", told.get("kernel")),
            ("packages", len(told.get("packages", {}))),
        )
    )
    show.out().print(describe_powershell(found), markup=False)


@app.command("rm")
def remove(image: Image) -> None:
    """Delete an image that no box needs any more."""
    places = Places.from_environment()
    store = ImageStore(places.images)
    found = find_image(image, store.list())
    try:
        store.remove(found.digest, lambda digest: _users(places, digest))
    except ImageInUseError as error:
        raise Failure(f"image {found.digest} is in use", cause=str(error), remedy="Delete these boxes first: `boxctl box rm`.") from error
    show.say(f"deleted {found.flavour} {found.digest}")


def _users(places: Places, digest: str) -> list[str]:
    """The boxes made of it. With the node down nobody knows, unless it has never had a box."""
    try:
        boxes = Api.on_socket("node", places.node_socket).ask("GET", "/v1/boxes")["boxes"]
    except NotRunning as error:
        if not places.node.exists():
            return []
        raise Failure("only the running node knows which boxes need this image", remedy="Start it: `boxctl up`.") from error
    return [f"box {box['id']}" for box in boxes if box["image"] == digest]


def _wire(image: StoredImage) -> dict[str, object]:
    return {
        "flavour": image.flavour,
        "digest": image.digest,
        "builtAt": image.built_at,
        "bytes": image.bytes,
        "folder": str(image.folder),
        "suite": image.manifest.get("suite"),
        "kernel": image.manifest.get("kernel"),
        "powershell": bool(image.manifest.get("powershell")),
    }
