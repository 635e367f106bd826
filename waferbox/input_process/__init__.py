"""The process that runs a user's input_fn for a worker, under the user's interpreter.

Only the standard library and the torch found there are needed: the package also runs under an interpreter that has no
Waferbox (waferbox.input_process.foreign), which is why its modules import each other relatively. The process and its
worker send each other messages (waferbox.input_process.messages) over a SEQPACKET socket:

    worker -> process   Prepare, once; Load, once; Fill, for each batch
    process -> worker   Filled, for each batch; State, for each step after which it is wanted; Failed, at last

Besides such a process nobody but the client reads the state of a loader, and it must not have to trust it: a state is
plain data, no pickle. A value is what it is in JSON, or a list that begins with a word: ["list", ...], ["tuple", ...],
["dict", [key, value], ...], ["bytes", base64], ["tensor", dtype, shape, base64], ["array", dtype, shape, base64]. For
the vendor's client, which reads pickles, a state is a text of hex, or empty where the loader has none.

The process ends when its end of the socket is closed.
"""
