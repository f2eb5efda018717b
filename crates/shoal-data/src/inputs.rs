//! Where samples are read to: a model takes tokens or images, and whoever reads for it need not know which.

/// Room for the inputs of one or more samples, end to end.
pub enum Inputs<'a> {
    Tokens(&'a mut [i32]),
    /// Tokens of samples that may be shorter than their room, and each sample's length.
    Padded(&'a mut [i32], &'a mut [i32]),
    Images(&'a mut [f32]),
}

impl<'a> Inputs<'a> {
    /// Room for tokens; where lengths are wanted too, it is said that the tokens fill it.
    ///
    /// # Panics
    /// If the room is for images: the data is not of the kind that the model takes. Likewise below.
    pub fn tokens(self) -> &'a mut [i32] {
        match self {
            Inputs::Tokens(tokens) => tokens,
            Inputs::Padded(tokens, lengths) => {
                lengths.fill((tokens.len() / lengths.len()) as i32);
                tokens
            }
            Inputs::Images(_) => panic!("tokens are read where images should be"),
        }
    }

    /// Room for tokens and lengths.
    pub fn padded(self) -> (&'a mut [i32], &'a mut [i32]) {
        match self {
            Inputs::Padded(tokens, lengths) => (tokens, lengths),
            Inputs::Tokens(_) => panic!("padded samples are read where whole ones should be"),
            Inputs::Images(_) => panic!("tokens are read where images should be"),
        }
    }

    pub fn images(self) -> &'a mut [f32] {
        match self {
            Inputs::Images(images) => images,
            Inputs::Tokens(_) | Inputs::Padded(..) => panic!("images are read where tokens should be"),
        }
    }

    /// The rooms of `samples` equally large samples.
    pub fn of_each(self, samples: usize) -> Vec<Inputs<'a>> {
        if samples == 0 {
            return Vec::new();
        }
        match self {
            Inputs::Tokens(all) => {
                let each = (all.len() / samples).max(1);
                all.chunks_mut(each).map(Inputs::Tokens).collect()
            }
            Inputs::Padded(all, lengths) => {
                let each = (all.len() / samples).max(1);
                let rooms = all.chunks_mut(each).zip(lengths.chunks_mut(1));
                rooms.map(|(tokens, length)| Inputs::Padded(tokens, length)).collect()
            }
            Inputs::Images(all) => {
                let each = (all.len() / samples).max(1);
                all.chunks_mut(each).map(Inputs::Images).collect()
            }
        }
    }
}
