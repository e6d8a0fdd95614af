//! Links the guest to fixed addresses, without the C runtime.

fn main() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/link.ld");
    for argument in
        ["-nostartfiles", "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,norelro"]
    {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
    println!("cargo::rustc-link-arg-bins=-Wl,-T,{script}");
    println!("cargo::rerun-if-changed=link.ld");
    println!("cargo::rerun-if-changed=src/boot.s");
}
