"""The process that runs a user's input_fn for a worker, under the user's interpreter.

The package needs the standard library and the interpreter's torch. It also runs under an interpreter without Waferbox
(waferbox.input_process.foreign), so its modules import each other relatively. The process and its worker exchange
messages (waferbox.input_process.messages) over a SEQPACKET socket:

    worker -> process   Prepare, once; Load, once; Fill, for each batch
    process -> worker   Filled, for each batch; State, for each requested step; Failed, as the last message

The state of a loader is read by such processes and by the client, which must not have to trust it. It is therefore
plain data, not a pickle: a JSON value, or a list that begins with a word: ["list", ...], ["tuple", ...], ["dict", [key,
value], ...], ["bytes", base64], ["tensor", dtype, shape, base64], ["array", dtype, shape, base64]. For the vendor's
client, which reads pickles, a state is a text of hex, or empty if the loader has none.

The process ends when the worker closes its end of the socket.
"""
