//! The common beginning of all our pages: one file that loads nothing, light and dark, on narrow windows too.

use maud::{DOCTYPE, Markup, PreEscaped, html};

/// A whole page. `styles` are trusted CSS, in order.
pub fn render_page(title: &str, styles: &[&str], body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width,initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { @for style in styles { (PreEscaped(style)) } }
            }
            body { (body) }
        }
    };
    page.into_string()
}
