"""Run by object_stores.py: the emulator of Google Cloud Storage, with what TensorStore's driver needs of the real one.

Downloads carry x-goog-generation. ifGenerationMatch and ifGenerationNotMatch are obeyed, under a lock.
"""

import re
import sys
import threading
from http import HTTPStatus

from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import objects

LOCK = threading.RLock()
download, insert, delete = objects.download, objects.insert, objects.delete


def generation(storage, bucket: str, name: str) -> str:
    """The generation of an object; "0": there is none."""
    try:
        return str(storage.get_file_obj(bucket, name)["generation"])
    except Exception:  # the emulator has one class for each cause
        return "0"


def option(request, name: str) -> str | None:
    return (request.query.get(name) or [None])[0]


def checked_download(request, response, storage, *rest):
    current = generation(storage, request.params["bucket_name"], request.params["object_id"])
    if current != "0":
        response["x-goog-generation"] = current
        response["x-goog-metageneration"] = "1"
    if option(request, "ifGenerationMatch") not in (None, current):
        response.status = HTTPStatus.PRECONDITION_FAILED
    elif option(request, "ifGenerationNotMatch") == current:
        response.status = HTTPStatus.NOT_MODIFIED
    else:
        content = download(request, response, storage, *rest)
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response._headers.get("Content-Range", ""))
        if match and int(match[1]) >= int(match[2]):
            response.status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        return content


def fails(request, response, current: str) -> bool:
    if option(request, "ifGenerationMatch") in (None, current):
        return False
    response.status = HTTPStatus.PRECONDITION_FAILED
    response.json({"error": {"code": 412, "message": "conditionNotMet"}})
    return True


def checked_insert(request, response, storage, *rest):
    with LOCK:
        name = option(request, "name")
        if not fails(request, response, generation(storage, request.params["bucket_name"], name)):
            return insert(request, response, storage, *rest)


def checked_delete(request, response, storage, *rest):
    with LOCK:
        current = generation(storage, request.params["bucket_name"], request.params["object_id"])
        if not fails(request, response, current):
            return delete(request, response, storage, *rest)


CHECKED = {download: checked_download, insert: checked_insert, delete: checked_delete}
for _, methods in server.HANDLERS:
    for method, handler in list(methods.items()):
        methods[method] = CHECKED.get(handler, handler)
objects.download, objects.insert, objects.delete = checked_download, checked_insert, checked_delete

if __name__ == "__main__":
    server.create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket=sys.argv[2]).run()
