//! Where samples are read to: a model takes tokens or images, and whoever reads for it need not know which.

/// Room for the inputs of one or more samples, end to end.
pub enum Inputs<'a> {
    Tokens(&'a mut [i32]),
    Images(&'a mut [f32]),
}

impl<'a> Inputs<'a> {
    /// # Panics
    /// If the room is for images: the data is not of the kind that the model takes. Likewise below.
    pub fn tokens(self) -> &'a mut [i32] {
        match self {
            Inputs::Tokens(tokens) => tokens,
            Inputs::Images(_) => panic!("tokens are read where images should be"),
        }
    }

    pub fn images(self) -> &'a mut [f32] {
        match self {
            Inputs::Images(images) => images,
            Inputs::Tokens(_) => panic!("images are read where tokens should be"),
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
            Inputs::Images(all) => {
                let each = (all.len() / samples).max(1);
                all.chunks_mut(each).map(Inputs::Images).collect()
            }
        }
    }
}
