//! `vmferry bench scan` without the command: `cargo run --release --example scan -- [quick [GIB]]`.

use vmferry_bench::scan;

fn main() -> std::io::Result<()> {
    let quick = std::env::args().nth(1).is_some_and(|argument| argument == "quick");
    let mut options = if quick { scan::Options::quick() } else { scan::Options::full() };
    if let Some(largest) = std::env::args().nth(2).and_then(|argument| argument.parse().ok()) {
        options.largest_gib = largest;
    }
    let document = scan::run(&options, &mut |what| eprintln!("{what}"));
    eprintln!("{}", scan::table(&document));
    document.write(std::io::stdout())
}
