"""Reports that cross from the engine to the HTTP process, in a test without either process."""

import msgspec

from tiercel.wire.frames import Report

_decoder = msgspec.msgpack.Decoder(Report)


def crossed(report: Report) -> Report:
    """Return a report as the HTTP process reads it.

    Errors: TypeError if a value is of a type that MessagePack does not know, such as a numpy scalar in a book. The
    daemon makes a plain value of it (`tiercel.wire.encoding`); here the book is to be mended.
    """
    return _decoder.decode(msgspec.msgpack.encode(report))
