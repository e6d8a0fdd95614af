//! Who executes commands: a thread for each client that asks for any, and one for what overtakes.

use crate::events::{Done, Hub};
use crate::machine::{self, Machine};
use crate::message::QmpError;
use crate::session::Call;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

pub(super) struct Workers {
    machine: Arc<dyn Machine>,
    hub: Arc<Hub>,
    count: Arc<AtomicUsize>,
    /// For what overtakes: commands that never wait.
    urgent: Sender<(u64, Call)>,
}

impl Workers {
    pub(super) fn start(machine: Arc<dyn Machine>, hub: Arc<Hub>) -> std::io::Result<Self> {
        let (urgent, calls) = channel::<(u64, Call)>();
        let (its_machine, its_hub) = (Arc::clone(&machine), Arc::clone(&hub));
        let work = move || {
            for (client, call) in calls {
                execute(&*its_machine, &its_hub, client, call);
            }
        };
        vmferry_thread::spawn(vmferry_thread::Role::Api, "api-oob", work)?;
        Ok(Self { machine, hub, count: Arc::default(), urgent })
    }

    /// Threads of clients, those that have left included.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Has `call` executed, by `worker` unless it overtakes; what comes of it is left in the hub.
    pub(super) fn give(&mut self, client: u64, call: Call, worker: &mut Option<Sender<Call>>) {
        self.hub.begin();
        let ticket = call.ticket;
        let given = if call.oob {
            self.urgent.send((client, call)).is_ok()
        } else {
            let worker = match worker {
                Some(worker) => Ok(worker),
                None => self.hire(client).map(|hired| worker.insert(hired)),
            };
            worker.is_ok_and(|worker| worker.send(call).is_ok())
        };
        if !given {
            let error = QmpError::generic("this host has no thread for the command; try again");
            self.hub.finish(Done { client, ticket, result: Err(error) });
        }
    }

    fn hire(&self, client: u64) -> std::io::Result<Sender<Call>> {
        let (calls, work) = channel();
        let (machine, hub, count) =
            (Arc::clone(&self.machine), Arc::clone(&self.hub), Arc::clone(&self.count));
        count.fetch_add(1, Ordering::AcqRel);
        let serve = move || {
            serve(&*machine, &hub, client, &work);
            count.fetch_sub(1, Ordering::AcqRel);
        };
        let hired = vmferry_thread::spawn(vmferry_thread::Role::Api, "api-client", serve);
        if hired.is_err() {
            self.count.fetch_sub(1, Ordering::AcqRel);
        }
        hired.map(|_| calls)
    }
}

/// Until its client has gone.
fn serve(machine: &dyn Machine, hub: &Hub, client: u64, work: &Receiver<Call>) {
    for call in work {
        execute(machine, hub, client, call);
    }
}

fn execute(machine: &dyn Machine, hub: &Hub, client: u64, call: Call) {
    let Call { ticket, name, arguments, oob, descriptor } = call;
    // A command that panics has said so on stderr; the client must not wait for ever, nor must the next command.
    let result =
        catch_unwind(AssertUnwindSafe(|| machine::execute(machine, &name, arguments, oob, descriptor)));
    let result = result
        .unwrap_or_else(|_| Err(QmpError::generic(format!("The command {name} panicked; see the log"))));
    hub.finish(Done { client, ticket, result });
}
