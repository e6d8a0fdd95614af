//! `vmferry bench scan` without the command: `cargo run --release --example scan -- [quick]`.

use vmferry_bench::scan;

fn main() -> std::io::Result<()> {
    let quick = std::env::args().nth(1).is_some_and(|argument| argument == "quick");
    let options = if quick { scan::Options::quick() } else { scan::Options::full() };
    let document = scan::run(&options, &mut |what| eprintln!("{what}"));
    eprintln!("{}", scan::table(&document));
    document.write(std::io::stdout())
}
