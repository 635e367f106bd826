"""The process that runs a user's input_fn for a worker, under the user's interpreter.

Only the standard library and the torch found there are needed: the package also runs under an interpreter that has no
Waferbox (waferbox.input_process.foreign), which is why its modules import each other relatively. The process speaks
with its worker over a SEQPACKET socket, one JSON object a message:

    worker -> child   prepare {python_paths, last_python_paths, worker, num_workers, ...}  + fd: the pickled builder
    worker -> child   load {members, global_rows, local_rows, micro_batches, slot_bytes, num_slots,
                           done_steps, state_steps}  + fd: the ring, and maybe one with a JSON list of states
    worker -> child   fill {slot, state_steps, recovery_step}   put this worker's next batch into a slot
    child -> worker   filled {slot}         | failed {message, traceback, killed}, after which nothing follows
    child -> worker   state {step}          + fd: the state of a restartable loader after a step, as JSON text

done_steps of the execution are not wanted: with the states of all workers' loaders after them the loader is resumed,
else the batches of these steps are skipped. state_steps are the steps, from that of the batch (or the first) to before
that of this worker's next, after which the state is wanted; recovery_step is one more, or 0: what is sent for it is
empty where the loader has no state that it can be resumed with. Besides such a process nobody but the client reads a
state, and it must not have to trust it: plain data, no pickle. A value
is what it is in JSON, or a list that begins with a word: ["list", ...], ["tuple", ...], ["dict", [key, value], ...],
["bytes", base64], ["tensor", dtype, shape, base64], ["array", dtype, shape, base64]. For the vendor's
client, which reads pickles, it is a text of hex (vendor_state), or empty where the loader has none.

The child ends when its end of the socket is closed.
"""
