//! Receiving process of the floor.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Instant;

use super::mapping::Mapping;
use super::{CALL_BYTES, FloorError, IO_LIMIT, MAX_BYTES, MAX_STREAMS, PAGE, process_cpu, word_at};

/// Parameters of a receiver.
#[derive(Debug, PartialEq, Eq)]
struct Order {
    streams: u32,
    share: usize,
    nonce: u64,
}

impl Order {
    fn parse(args: &[String]) -> Result<Self, FloorError> {
        let usage = || FloorError::Usage(format!("want STREAMS BYTES-PER-STREAM NONCE, got {args:?}"));
        let [streams, share, nonce] = args else { return Err(usage()) };
        let order = Order {
            streams: streams.parse().map_err(|_| usage())?,
            share: share.parse().map_err(|_| usage())?,
            nonce: nonce.parse().map_err(|_| usage())?,
        };
        let sane = (1..=MAX_STREAMS).contains(&order.streams)
            && order.share > 0
            && order.share.is_multiple_of(PAGE)
            && order.share as u64 <= MAX_BYTES;
        if sane { Ok(order) } else { Err(usage()) }
    }
}

/// Receives one copy into fresh memory. `args` are the arguments that [`super::run`] appended to
/// the subcommand.
///
/// Prints `PORT n` when it listens, `CPU nanoseconds` when it has received and acknowledged
/// everything, and `PAGES n`, the number of pages with the right content.
///
/// # Errors
///
/// Fails if the arguments are malformed, a system call fails, or the sender does not connect in
/// time.
pub fn receiver_main(args: &[String]) -> Result<(), FloorError> {
    let order = Order::parse(args)?;
    let mut memory = Mapping::new(order.share * order.streams as usize)
        .map_err(FloorError::io("map the target memory"))?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(FloorError::io("listen"))?;
    let port = listener.local_addr().map_err(FloorError::io("listen"))?.port();
    print_line(&format!("PORT {port}"))?;

    let mut sockets = accept(&listener, &order)?;
    let cpu_before = process_cpu();
    receive_all(&mut sockets, memory.bytes_mut(), order.share)?;
    print_line(&format!("CPU {}", process_cpu().saturating_sub(cpu_before).as_nanos()))?;

    let words_a_page = (PAGE / 8) as u64;
    let right = memory
        .bytes()
        .chunks_exact(PAGE)
        .zip(0u64..)
        .filter(|(page, index)| page[..8] == word_at(index * words_a_page).to_le_bytes())
        .count();
    print_line(&format!("PAGES {right}"))
}

fn print_line(line: &str) -> Result<(), FloorError> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(FloorError::io("answer the sender"))
}

/// Accepts every stream of the copy, in the order of their indexes. Connections without the nonce
/// are closed.
fn accept(listener: &TcpListener, order: &Order) -> Result<Vec<TcpStream>, FloorError> {
    let mut slots: Vec<Option<TcpStream>> = (0..order.streams).map(|_| None).collect();
    let deadline = Instant::now() + IO_LIMIT;
    listener.set_nonblocking(true).map_err(FloorError::io("listen"))?;
    while slots.iter().any(Option::is_none) {
        if Instant::now() > deadline {
            return Err(FloorError::Usage("the sender did not connect".into()));
        }
        match listener.accept() {
            Ok((socket, _)) => {
                if let Some((index, socket)) = accept_channel(socket, order.nonce)
                    && let Some(slot) = slots.get_mut(index)
                {
                    *slot = Some(socket);
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
            Err(e) => return Err(FloorError::io("accept a stream")(e)),
        }
    }
    Ok(slots.into_iter().flatten().collect())
}

/// Reads the nonce and the index of a stream. Returns `None` if the stream is not the sender's.
fn accept_channel(mut socket: TcpStream, nonce: u64) -> Option<(usize, TcpStream)> {
    socket.set_nonblocking(false).ok()?;
    socket.set_nodelay(true).ok()?;
    socket.set_read_timeout(Some(IO_LIMIT)).ok()?;
    socket.set_write_timeout(Some(IO_LIMIT)).ok()?;
    let (mut theirs, mut index) = ([0u8; 8], [0u8; 4]);
    socket.read_exact(&mut theirs).ok()?;
    socket.read_exact(&mut index).ok()?;
    (u64::from_le_bytes(theirs) == nonce).then_some((u32::from_le_bytes(index) as usize, socket))
}

fn receive_all(sockets: &mut [TcpStream], memory: &mut [u8], share: usize) -> Result<(), FloorError> {
    std::thread::scope(|scope| {
        let receivers: Vec<_> = sockets
            .iter_mut()
            .zip(memory.chunks_exact_mut(share))
            .map(|(socket, part)| scope.spawn(move || receive_one(socket, part)))
            .collect();
        receivers.into_iter().try_for_each(|receiver| match receiver.join() {
            Ok(result) => result.map_err(FloorError::io("receive from the sender")),
            Err(_) => Err(FloorError::Usage("a receiving thread panicked".into())),
        })
    })
}

fn receive_one(socket: &mut TcpStream, part: &mut [u8]) -> io::Result<()> {
    for call in part.chunks_mut(CALL_BYTES) {
        socket.read_exact(call)?;
    }
    socket.write_all(&[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_arguments_are_rejected() {
        let parse = |text: &str| Order::parse(&text.split(' ').map(String::from).collect::<Vec<_>>());
        assert_eq!(parse("2 4096 7").unwrap(), Order { streams: 2, share: 4096, nonce: 7 });
        for bad in ["", "2 4096", "0 4096 7", "2 0 7", "2 4095 7", "65 4096 7", "2 4096 7 8", "2 x 7"] {
            assert!(matches!(parse(bad), Err(FloorError::Usage(_))), "{bad}");
        }
    }

    #[test]
    fn connection_with_another_nonce_is_rejected() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        for (sent, known) in [(7u64, true), (8, false)] {
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(&sent.to_le_bytes()).unwrap();
            client.write_all(&3u32.to_le_bytes()).unwrap();
            let (server, _) = listener.accept().unwrap();
            assert_eq!(accept_channel(server, 7).map(|(index, _)| index), known.then_some(3));
        }
    }
}
