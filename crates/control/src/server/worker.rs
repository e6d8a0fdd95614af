//! Threads that execute commands: one for each client that has sent a command, and one for the
//! out-of-band commands of all clients.

use crate::events::{Done, EventQueue};
use crate::machine::{self, Machine};
use crate::message::QmpError;
use crate::session::Call;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

pub(super) struct Workers {
    machine: Arc<dyn Machine>,
    hub: Arc<EventQueue>,
    count: Arc<AtomicUsize>,
    /// Queue of the thread for out-of-band commands, which never wait.
    urgent: Sender<(u64, Call)>,
}

impl Workers {
    pub(super) fn start(machine: Arc<dyn Machine>, hub: Arc<EventQueue>) -> std::io::Result<Self> {
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

    /// Returns the number of threads of clients, including those of clients that have disconnected.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Passes `call` to the thread that executes it, which is `worker` unless the call is out of
    /// band. The thread puts the result into the hub.
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
            let error = QmpError::generic("no thread can be started for the command; try again");
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

/// Executes the commands of one client until the client disconnects.
fn serve(machine: &dyn Machine, hub: &EventQueue, client: u64, work: &Receiver<Call>) {
    for call in work {
        execute(machine, hub, client, call);
    }
}

fn execute(machine: &dyn Machine, hub: &EventQueue, client: u64, call: Call) {
    let Call { ticket, name, arguments, oob, descriptor } = call;
    // Catch a panic, because the client must get an answer and the next command must run. The panic
    // was printed on standard error.
    let result =
        catch_unwind(AssertUnwindSafe(|| machine::execute(machine, &name, arguments, oob, descriptor)));
    let result = result
        .unwrap_or_else(|_| Err(QmpError::generic(format!("The command {name} panicked; see the log"))));
    hub.finish(Done { client, ticket, result });
}
