//! A process that ends with the one that started it, however that one ends: its standard input is a pipe whose other end
//! only that process holds.

use std::io::Read;

#[derive(clap::Args)]
pub struct Leash {
    /// End when standard input does: whoever started it has gone
    #[arg(long, hide = true)]
    leash: bool,
}

impl Leash {
    pub fn hold(&self) {
        if self.leash {
            std::thread::spawn(|| {
                let (mut input, mut ignored) = (std::io::stdin().lock(), [0; 64]);
                while input.read(&mut ignored).is_ok_and(|read| read > 0) {}
                std::process::exit(1);
            });
        }
    }
}
